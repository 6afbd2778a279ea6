"""The step, optimizer and learning rate of a run, from objects, functions or names."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from etude.callbacks import LRSchedule
from etude.config import build_selection, lookup
from etude.config.schema import select_component
from etude.config.signature import parameters_of
from etude.core import ConfigError, Task, TrainingError
from etude.distributed.parallel import wrap_data_parallel
from etude.engine.callback import Callback
from etude.engine.capture import Capture
from etude.engine.captured_evaluation import CapturedEvaluation
from etude.engine.compiled import CompiledTask
from etude.engine.step import Step
from etude.engine.update import LearningRate, Updater
from etude.optim import AdamW, Schedule
from etude.optim.eager import without_compiler
from etude.optim.groups import NamedParams, names_of, outer_params
from etude.optim.several import Optimizers, check_shares
from etude.trainer.arguments import Section, build_named, expect
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine, making_model

logger = logging.getLogger("etude")

TorchScheduler = torch.optim.lr_scheduler.LRScheduler

DEFAULT_SCHEDULE = "warmup_cosine"
"""The default schedule of a config or a Trainer that enables one without naming it."""


OptimizerLike = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    | Section
    | None
)


@runtime_checkable
class GroupsParameters(Protocol):
    """A model that tells which of its parameters need different optimizer settings."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable parameters as optimizer parameter groups."""


def make_step(
    model: nn.Module,
    task: Task,
    optimizer: OptimizerLike,
    config: TrainerConfig,
    machine: Machine,
    *,
    uses_all_parameters: bool = True,
) -> Step:
    """Move a model to the device, create its optimizer, and return the step that trains it.

    Without `uses_all_parameters` a step may leave out parameters that the optimizer has.
    """
    task.join(model)
    with making_model(machine.device):
        machine.place(model, config)
        made = make_optimizer(optimizer, model, config)
        task.extend(made)
        wrapped = model
        if machine.world.size > 1:
            unused = config.find_unused_parameters or not uses_all_parameters
            wrapped = wrap_data_parallel(model, made, machine.device, find_unused_parameters=unused)
    clip = {"clip_norm": config.gradient_clip_norm, "clip_value": config.gradient_clip_value}
    updater = Updater(made, **clip, precision=machine.precision)
    metrics = None if isinstance(config.train_metrics, list) else config.train_metrics
    step = Step(wrapped, task, updater, machine.precision, world=machine.world, metrics=metrics)
    if machine.captures(config.capture):
        step.capture = Capture(step, needed=config.capture == "on")
        machine.evaluation = CapturedEvaluation(step.capture.recorder, needed=step.capture.needed)
    return step


def compile_step(step: Step, config: TrainerConfig, machine: Machine, loaders: Loaders) -> CompiledTask:
    """Use compiled code for the terms of a step if the config says so or leaves it open; return what decides."""
    way = machine.compiled(config.compile)
    compiled = CompiledTask(
        step.objective.task,
        mode=config.compile,
        way=way,
        batch_size=loaders.batch_size,
        notice=lambda words: step.notice(words),
        warn=lambda words: step.warn(words),
    )
    if way is None:
        step.forward = compiled
    return compiled


@without_compiler()
def make_optimizer(optimizer: Any, model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the given optimizer, or one built from a name, class or function of the parameters; default AdamW.

    Several given ones become one.
    """
    names = names_of(model)
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ConfigError("the model has no parameters that require gradients: there is nothing to train")
    if isinstance(optimizer, (list, tuple)):
        for one in optimizer:
            check_optimizer(one, model)
        check_shares(optimizer, names, params)
        optimizer = Optimizers(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer, model)
        _check_settings(optimizer, config)
        follow_parameters(optimizer)
        return optimizer
    groups = NamedParams(params, names, outer_params(model))
    if isinstance(model, GroupsParameters) and len(found := model.parameter_groups()) > 1:
        groups = groups.with_items(found)
    chosen = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    given: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
    if optimizer is None:
        return AdamW(groups, **given)
    made = optimizer_factory(optimizer, given)(groups)
    check_optimizer(made, model)
    _check_settings(made, config)
    return made


def _check_settings(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> None:
    """Raise ConfigError if the config has a learning rate or weight decay that differs from the optimizer's."""
    for key, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        value = getattr(config, key)
        made = [float(one.get(name, 0.0)) for one in (optimizer.defaults, *optimizer.param_groups)]
        if value is not None and value not in made:
            raise ConfigError(
                f"training.{key} is {value:g}, but the given optimizer has {name} {made[-1]:g}; remove one of them"
            )


@without_compiler()
def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state, loaded before the model was moved, to the devices of its parameters."""
    tensors = (
        (param, value)
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    if any(value.device != param.device for param, value in tensors):
        optimizer.load_state_dict(optimizer.state_dict())  # load_state_dict moves the state


@contextmanager
def hyperparameters(optimizer: torch.optim.Optimizer, callbacks: Iterable[Callback], *, keep: bool) -> Iterator[None]:
    """Load a checkpoint in this context; with `keep`, learning rate, weight decay and so on do not change."""
    mine = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if keep and any(isinstance(one, LRSchedule) for one in callbacks):
        raise ConfigError(
            "keep_hyperparameters cannot change the rates inside a torch scheduler; use a function of the step, "
            "such as etude.optim.cosine"
        )
    yield
    if not keep:
        return
    for group, settings in zip(optimizer.param_groups, mine, strict=True):
        group.pop("initial_lr", None)  # the checkpoint's base rate
        group.update(settings)


def optimizer_factory(optimizer: Any, settings: Mapping[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function of the parameters from such a function, an optimizer class, or a name.

    A class or a name gets `settings` (learning rate and weight decay of the config) unless it has its own. Raises
    ConfigError for anything else.
    """
    if isinstance(optimizer, (str, Mapping)):
        section = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
        own = {"lr"} if "learning_rate" in section else set(section)
        if "." in str(section.get("name")):  # a class that is not etude's may have no weight decay
            takes = parameters_of(lookup("optimizer", section["name"]).factory)[0]
            settings = {key: value for key, value in settings.items() if key in takes}
        section = {**{key: value for key, value in settings.items() if key not in own}, **section}
        return lambda params: build_named("optimizer", section, "optimizer", params=params)
    is_class = isinstance(optimizer, type)
    if not (is_class and issubclass(optimizer, torch.optim.Optimizer)):
        expect("optimizer", optimizer, callable(optimizer), "an optimizer, a function that makes one, or a name")

    def make(params: Any) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = optimizer(params, **(settings if is_class else {}))
        except TypeError as error:
            raise ConfigError(f"optimizer cannot be built from the parameters: {error}") from error
        return made

    return make


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise ConfigError for a non-optimizer or one with a closure, TrainingError for one of another model."""
    if isinstance(optimizer, (list, tuple)):  # `Trainer` has made one of them
        raise ConfigError("optimizer is a list; make one of it with etude.optim.Optimizers([…])")
    expect("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "or make a torch optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} needs a closure that computes the loss several times per step, "
            "which is not supported; use another one, such as 'adamw'"
        )
    mine = set(map(id, model.parameters()))
    if not any(id(param) in mine for group in optimizer.param_groups for param in group["params"]):
        raise TrainingError("the optimizer holds none of the model's parameters: build it from model.parameters()")


def check_scheduler(scheduler: Any) -> None:
    """Raise ConfigError for a scheduler that is neither a function of the step nor a torch scheduler."""
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    made = scheduler.func if isinstance(scheduler, functools.partial) else scheduler
    is_function = callable(scheduler) and not callable(
        getattr(scheduler, "step_update", None)
    )  # timm's schedulers are not functions
    expect("scheduler", made, is_function, "a function of the step, a torch scheduler or a name such as 'cosine'")


# ------------------------------------------------------------------------------------------------ learning rate


class PlannedSchedule:
    """A schedule as long as the run: built from the plan, and rebuilt when the plan changes."""

    def __init__(self, make: Callable[[dict[str, int]], Schedule]) -> None:
        """`make` receives `total_steps` and `steps_per_epoch`, if known."""
        self._make = make
        self._made: tuple[dict[str, int], Schedule] | None = None

    def for_plan(self, total_steps: int | None, steps_per_epoch: int | None) -> Schedule:
        """Return the schedule for a run of this many steps."""
        plan = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
        known = {name: steps for name, steps in plan.items() if steps is not None}
        if self._made is None or self._made[0] != known:
            self._made = known, self._make(known)
        return self._made[1]


SchedulerLike = Schedule | TorchScheduler | PlannedSchedule | Section | None


class RunRate(LearningRate):
    """The learning rate of a run: constant, a function of the step, a torch scheduler, or a named schedule."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: SchedulerLike, config: TrainerConfig, loaders: Loaders
    ) -> None:
        """Use the given scheduler, or the one that the config asks for; `loaders` know the length of a run."""
        self._loaders = loaders
        self._planned = _planned(scheduler, config)
        is_torch = isinstance(scheduler, TorchScheduler)
        fixed: Any = None if is_torch or self._planned is not None else scheduler
        super().__init__(optimizer, fixed)
        self.callbacks = [LRSchedule(scheduler, interval="step")] if isinstance(scheduler, TorchScheduler) else []
        """The callback that steps a torch scheduler."""
        if loaders.train is not None and (scheduler is not None or loaders.total_steps(config) is None):
            self.follow(config)  # refuse an invalid schedule early

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule sets the rate of every step; a torch scheduler is stepped by a callback."""
        return self._planned is not None or self.schedule is not None

    def follow(self, config: TrainerConfig) -> None:
        """Set the length of a schedule that is as long as the run."""
        if self._planned is not None:
            loaders = self._loaders
            self.schedule = self._planned.for_plan(loaders.total_steps(config), loaders.steps_per_epoch)


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
        return _named_schedule(section)
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
        return _named_schedule(scheduler)
    if isinstance(scheduler, PlannedSchedule):
        return scheduler
    check_scheduler(scheduler)
    return None


def _named_schedule(section: str | Mapping[str, Any]) -> PlannedSchedule:
    selection = select_component("scheduler", section, provided=("total_steps", "steps_per_epoch"))

    def make(plan: dict[str, int]) -> Schedule:
        if "total_steps" not in plan and "total_steps" in parameters_of(selection.component.factory)[0]:
            raise ConfigError(
                f"the schedule '{selection.component.name}' needs the length of the run, which the loader does not "
                "know; set training.max_steps, or pass the Trainer scheduler=…"
            )
        schedule: Schedule = build_selection(selection, path="scheduler", provided=plan)
        return schedule

    return PlannedSchedule(make)
