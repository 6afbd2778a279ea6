"""The learning rate of a run, from a function, a name, or a scheduler of torch or timm."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from pydantic_core import PydanticUndefined

from etude.callbacks import LRSchedule
from etude.callbacks.lr_schedule import CountedScheduler
from etude.config import Document, Selection, build_selection
from etude.config.schema import select_component
from etude.config.selection import selections_in
from etude.config.signature import parameters_of
from etude.core import Clock, ConfigError
from etude.engine.callback import Callback
from etude.engine.learning_rate import LearningRate
from etude.optim import Schedule, Schedules
from etude.optim.schedule_free import with_modes
from etude.trainer.arguments import Section, expect
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders

logger = logging.getLogger("etude")

DEFAULT_SCHEDULE = "warmup_cosine"
"""The default schedule of a config or a Trainer that enables one without naming it."""

PLAN = ("total_steps", "steps_per_epoch")
"""Arguments of a schedule that are known from the run."""


class PlannedSchedule:
    """A schedule as long as the run: built from the plan, and rebuilt when the plan changes."""

    def __init__(self, selection: Selection, document: Document | None = None) -> None:
        """The arguments of the selection are those of the file; `total_steps` and `steps_per_epoch` are added."""
        self._selection = selection
        self._document = document
        self.place = (document or Document({})).place("scheduler")
        """Location of the section, for messages."""
        self._made: tuple[dict[str, int], Schedule] | None = None

    def for_plan(self, total_steps: int | None, steps_per_epoch: int | None) -> Schedule:
        """Return the schedule for a run of this many steps; warn of what lies beyond its end."""
        plan = dict(zip(PLAN, (total_steps, steps_per_epoch), strict=True))
        known = {name: steps for name, steps in plan.items() if steps is not None}
        if self._made is None or self._made[0] != known:
            component = self._selection.component
            is_given = self._selection.arguments.get("total_steps") is not None
            if total_steps is None and not is_given and _needs(component.factory, "total_steps"):
                raise ConfigError(
                    f"the schedule '{component.name}' needs the length of the run, which the loader does not know; "
                    "set training.max_steps, or pass the Trainer scheduler=…"
                )
            made = build_selection(self._selection, path="scheduler", document=self._document, provided=known)
            for words in _beyond(self._selection, known):
                logger.warning(words)
            self._made = known, made
        return self._made[1]


SchedulerLike = Schedule | torch.optim.lr_scheduler.LRScheduler | CountedScheduler | PlannedSchedule | Section | None


class RunRate(LearningRate):
    """The learning rate of a run: constant, a function of the step, a named schedule, or torch's or timm's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: SchedulerLike, config: TrainerConfig, loaders: Loaders
    ) -> None:
        """Use the given scheduler, or the one that the config asks for; `loaders` know the length of a run."""
        self._loaders = loaders
        self._planned = _planned(scheduler, config)
        super().__init__(optimizer, None if self._planned is not None else function_of(scheduler))
        is_named = scheduler is not None or config.scheduler_type is not None
        if loaders.train is not None and (is_named or loaders.total_steps(config) is None):
            self.follow(config)  # refuse an invalid schedule early
        self.callbacks = drivers_of(scheduler if self._planned is None else self.schedule)
        """The callbacks of the schedule; those of the first plan stay, with their state, if the plan changes."""
        self._has_advised = False

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule sets the rate of every step; a torch scheduler is stepped by a callback."""
        return self._planned is not None or self.schedule is not None

    def follow(self, config: TrainerConfig, clock: Clock | None = None) -> None:
        """Set the length of a schedule that is as long as the run, whose progress is `clock`."""
        if self._planned is not None:
            loaders = self._loaders
            schedule = self._planned.for_plan(loaders.total_steps(config, clock), loaders.steps_per_any_epoch)
            try:
                self.use(schedule)
            except ConfigError as error:
                raise ConfigError(f"{self._planned.place}: {error}") from error

    def advise(self, config: TrainerConfig, callbacks: Iterable[Callback] = (), clock: Clock | None = None) -> None:
        """Warn, once, of what is no error but hardly intended: a rate of 0, or changes after the end of the run.

        So are a falling rate beside an average that replaces it, and the rate of a schedule that there is no longer.
        """
        if self._has_advised or self.optimizer is None:
            return
        self._has_advised = True
        total = self._loaders.total_steps(config, clock)
        for words in (*_idle(self.schedule, total), *_epochs_beyond(config)):
            logger.warning(words)
        is_set = self.schedule is not None or self.scales  # a curriculum may scale rates without a schedule
        if not is_set and not any(isinstance(one, LRSchedule) for one in callbacks):
            for words in _left_behind(self.optimizer.param_groups[0]):
                logger.warning(words)
        if not self.callbacks and not any(
            group.get("initial_lr", group["lr"]) for group in self.optimizer.param_groups
        ):
            logger.warning("the learning rate of the optimizer is 0, so nothing is learned; set it above 0")
        for one in with_modes(self.optimizer):
            for words in _beside_average(one, Schedules.of(self.schedule) if self.schedule else None, total):
                logger.warning("%s: %s", type(one).__name__, words)
            if self.callbacks:
                logger.warning("%s: %s", type(one).__name__, _ADVICE)


_ADVICE = (
    "its average of the weights replaces a falling rate, and its authors advise against both; remove the scheduler"
)


def _idle(schedule: Schedule | None, total: int | None) -> Iterator[str]:
    """Yield a line if all rates are 0 in the whole run, or in more than a tenth of it, up to the end."""
    if schedule is None or not total:
        return
    plan = Schedules.of(schedule)
    first = total
    while first and not any(one(first - 1) for one in (plan.lr, *plan.groups.values())):
        first -= 1
    if total - first > max(1, total // 10):
        place = f"from step {first} of {total} on" if first else f"in all {total} steps"
        yield f"the schedule sets the learning rate to 0 {place}, where nothing is learned; change the schedule"


def _left_behind(group: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if a schedule has set the rate of a group that no longer follows one."""
    rate, base = float(group["lr"]), float(group.get("initial_lr", group["lr"]))
    if rate != base:
        yield (
            f"the learning rate stays at {rate:.3g}, where an earlier schedule left it (base {base:.3g}), "
            "because this run has no schedule; set the rate (optimizer.lr), or a schedule"
        )


def _epochs_beyond(config: TrainerConfig) -> Iterator[str]:
    """Yield a line for each size that changes in an epoch that the run does not have."""
    for name in ("batch_size", "grad_accum_steps"):
        said = getattr(config, name)
        if isinstance(said, Mapping) and config.num_epochs is not None and max(said) >= config.num_epochs:
            yield (
                f"training.{name} changes in epoch {max(said)}, counted from 0, but the run has only "
                f"{config.num_epochs} epochs, so it does not get there"
            )


def _beside_average(optimizer: Any, plan: Schedules | None, total: int | None) -> Iterator[str]:
    """Yield a line for each way in which schedule and optimizer do the same."""
    own = max(group.get("warmup_steps", 0) for group in optimizer.param_groups)
    if total is not None and own >= total:
        yield f"warmup_steps is {own} but the run has only {total} steps, so the rate does not reach lr; shorten it"
    steps = range(0, total or 10_000, max(1, (total or 10_000) // 100))
    rates = [[one(step) for step in steps] for one in ((plan.lr, *plan.groups.values()) if plan is not None else ())]
    if any(values[-1] < max(values) for values in rates):
        yield _ADVICE
    if own and any(values[0] < max(values) for values in rates):
        yield "its warmup_steps and the scheduler both warm up, and the factors are multiplied; keep one of them"


def check_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for a scheduler that is neither a function of the step nor torch's or timm's."""
    if is_stepped(scheduler):
        return
    if isinstance(scheduler, (str, Mapping)):
        raise ConfigError(
            "a scheduler by name needs the length of the run, which only a Trainer knows; make it, as in "
            "etude.optim.cosine(total_steps=1000)"
        )
    made = scheduler.func if isinstance(scheduler, functools.partial) else scheduler
    expect(
        "scheduler", made, callable(scheduler), "a function of the step, a torch scheduler or a name like 'cosine'"
    )


def is_stepped(scheduler: Any) -> bool:
    """Return whether a scheduler has a state and is stepped, as torch's and timm's are."""
    return not isinstance(scheduler, type) and isinstance(
        scheduler, (torch.optim.lr_scheduler.LRScheduler, CountedScheduler)
    )


def function_of(scheduler: Any) -> Schedule | None:
    """Return a scheduler that is a function of the step; None if it is stepped."""
    return None if is_stepped(scheduler) else scheduler


def drivers_of(scheduler: Any) -> list[Callback]:
    """Return the callbacks that a scheduler needs: one that steps it, or those that it brings."""
    if is_stepped(scheduler):
        return [LRSchedule(scheduler, interval="step")]
    return [*Schedules.of(scheduler).callbacks] if scheduler is not None else []


def _planned(scheduler: SchedulerLike, config: TrainerConfig) -> PlannedSchedule | None:
    """Return the schedule that is built from the plan of a run; None if there is none, or if its length is fixed.

    `scheduler_type` names it; with only `use_scheduler` or `warmup_steps` it is `warmup_cosine`. Raises ConfigError
    if the name is unknown, or needs more arguments.
    """
    if scheduler is not None:
        return _given(scheduler, config)
    asked = config.use_scheduler or config.scheduler_type is not None or config.warmup_steps is not None
    if not asked or config.use_scheduler is False:
        return None
    section: dict[str, Any] = {"name": config.scheduler_type or DEFAULT_SCHEDULE}
    if config.warmup_steps is not None:
        section["warmup_steps"] = config.warmup_steps
    try:
        return PlannedSchedule(select_component("scheduler", section, provided=PLAN))
    except ConfigError as error:
        raise ConfigError(
            f"training.scheduler_type '{section['name']}' cannot be used: {error}; "
            f"for more arguments, pass the Trainer scheduler=…, a function of the step"
        ) from error


def _given(scheduler: SchedulerLike, config: TrainerConfig) -> PlannedSchedule | None:
    """Return a given scheduler if it is as long as the run; the config must not ask for another one."""
    if config.use_scheduler is False:
        raise ConfigError("a scheduler is given, but training.use_scheduler is false; remove one of them")
    if idle := [
        f"training.{name}" for name in ("scheduler_type", "warmup_steps") if getattr(config, name) is not None
    ]:
        logger.warning("a scheduler is given, so there is no effect of %s; remove one of them", " and ".join(idle))
    if isinstance(scheduler, (str, Mapping)):
        return PlannedSchedule(select_component("scheduler", scheduler, provided=PLAN))
    if isinstance(scheduler, PlannedSchedule):
        return scheduler
    check_scheduler(scheduler)
    return None


def _needs(factory: Callable[..., Any], argument: str) -> bool:
    """Return whether an argument of a component has no default."""
    known = parameters_of(factory)[0]
    return argument in known and known[argument][1] is PydanticUndefined


def _beyond(selection: Selection, plan: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each length in the file that lies beyond the end of the run."""
    total = plan.get("total_steps")
    for path, one in selections_in(selection, "scheduler").items():
        in_epochs = one.arguments.get("unit") == "epoch"
        for name in ("total_steps", "milestones", "step_size", "first_period"):
            said = one.arguments.get(name) or 0
            steps = max(said) if isinstance(said, (list, tuple)) else said
            steps *= plan.get("steps_per_epoch", 1) if in_epochs and name != "total_steps" else 1
            changes = name in ("milestones", "step_size")  # the rates of later steps
            if total is not None and steps > total - changes:
                words = "more than" if steps > total else "as many as"
                yield f"{path}.{name}: {steps} steps are {words} the {total} of the run, so it does not get there"
