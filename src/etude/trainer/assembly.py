"""Parts of a run made from what the user of a `Trainer` gives: config, optimizer, schedule, curriculum."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader

from etude.config import build_selection, canonical_keys, select_component, validate_section
from etude.config.signature import parameters_of
from etude.core import ConfigError, Loader, Task, TrainingError
from etude.core.terms import SwitchesTasks
from etude.distributed import World
from etude.engine.accumulation import GradientAccumulator
from etude.engine.schedule import LearningRate
from etude.multitask.curriculum import Curriculum, Phase
from etude.multitask.curriculum.callback import CurriculumCallback
from etude.multitask.task import MultiTask
from etude.optim import AdamW, Schedule
from etude.trainer.arguments import check_optimizer, check_scheduler, optimizer_factory
from etude.trainer.config import TRAINING_ALIASES, ActivationCheckpointing, TrainerConfig
from etude.trainer.feeding import DeviceLoader

logger = logging.getLogger("etude")

TorchScheduler = torch.optim.lr_scheduler.LRScheduler

DEFAULT_SCHEDULE = "warmup_cosine"
"""The schedule of a config that asks for one without naming it, in a file or in Python."""


@runtime_checkable
class GroupsParameters(Protocol):
    """A model that says which of its parameters an optimizer must treat otherwise."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable parameters in groups, as optimizers take them."""


def planned_steps(config: TrainerConfig, num_batches: int | None) -> int | None:
    """Return the optimizer steps of a whole run with `num_batches` batches per epoch; None if it has no known end."""
    epochs, max_steps = config.num_epochs, config.max_steps
    if epochs is None or num_batches is None:
        return max_steps
    steps = GradientAccumulator(accumulation_steps=config.grad_accum_steps).num_steps(num_batches, range(epochs))
    return steps if max_steps is None else min(steps, max_steps)


def as_config(
    config: TrainerConfig | Mapping[str, Any] | None,
    *,
    device: str | torch.device | None,
    use_amp: bool | None,
    compile_model: bool | None,
) -> TrainerConfig:
    """Return the config as a `TrainerConfig`, with what the `Trainer` was given beside it."""
    if config is not None and not isinstance(config, (TrainerConfig, Mapping)):
        raise ConfigError(
            f"config must be a TrainerConfig or a mapping of its keys, found {type(config).__name__}; "
            f"load_config reads a file, and its `.training` is one"
        )
    if not isinstance(config, TrainerConfig):
        data = canonical_keys(dict(config or {}), TRAINING_ALIASES, "training", None)
        config = validate_section(TrainerConfig, data, path="training", document=None)
    for name, value in (("use_amp", use_amp), ("compile_model", compile_model)):
        if not isinstance(value, bool | None):
            raise ConfigError(f"{name} must be True, False or None, found {value!r}")
    changes: dict[str, Any] = {}
    if device is not None:
        changes["device"] = str(device)
    if compile_model is not None:
        changes["compile_model"] = compile_model
    if use_amp is not None:
        changes["use_mixed_precision"] = use_amp
        if use_amp and config.precision_dtype is None and config.precision in ("bf16", "fp16"):
            changes["precision_dtype"] = config.precision
    return config.model_copy(update=changes)


def blocks_to_recompute(setting: bool | str | ActivationCheckpointing) -> dict[str, Any]:
    """Return the arguments of `recompute_activations`."""
    if isinstance(setting, ActivationCheckpointing):
        return {"blocks": setting.blocks, "every": setting.every}
    return {"blocks": setting} if isinstance(setting, str) else {}


def make_optimizer(optimizer: Any, model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the optimizer itself, one made by a name, a class or a function of the parameters, or AdamW."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ConfigError("the model has no parameters that require gradients: there is nothing to train")
    if isinstance(optimizer, torch.optim.Optimizer):
        mine = {id(param) for param in params}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise TrainingError(
                "the optimizer holds none of the model's parameters: build it from model.parameters()"
            )
        check_optimizer(optimizer)
        _check_settings(optimizer, config)
        follow_parameters(optimizer)
        return optimizer
    groups: Any = params
    if isinstance(model, GroupsParameters) and len(found := model.parameter_groups()) > 1:
        groups = found
    chosen = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    given: dict[str, Any] = {key: value for key, value in chosen.items() if value is not None}
    if optimizer is None:
        return AdamW(groups, **given)
    made = optimizer_factory(optimizer, given)(groups)
    check_optimizer(made)
    _check_settings(made, config)
    return made


def _check_settings(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> None:
    """Raise ConfigError if the config has a learning rate or weight decay that the optimizer was not made with."""
    for key, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        value = getattr(config, key)
        made = [float(one.get(name, 0.0)) for one in (optimizer.defaults, *optimizer.param_groups)]
        if value is not None and value not in made:
            raise ConfigError(
                f"training.{key} is {value:g}, but the optimizer that is given has {name} {made[-1]:g}; "
                f"leave one of them out"
            )


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state, loaded before the model was moved, to the devices of its parameters."""
    tensors = (
        (param, value)
        for param, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    if any(value.device != param.device for param, value in tensors):
        optimizer.load_state_dict(optimizer.state_dict())  # which moves what it loads


def warn_of_loader(source: Any, config: TrainerConfig, world: World) -> None:
    """Warn of settings that say other than a loader that is made already: they cannot change it."""
    if not world.is_main:
        return
    for name in ("batch_size", "drop_last", "num_workers"):
        value, found = getattr(config, name), getattr(source, name, None)
        if name == "batch_size" and isinstance(source, TorchDataLoader) and found is not None:
            found *= world.size  # it gives the batches of one process
        if name in config.model_fields_set and found is not None and found != value:
            logger.warning(
                "training.%s is %s, but the loader that is given has %s, and keeps it; "
                "give the data itself, or leave the setting out",
                name,
                value,
                found,
            )


class PlannedSchedule:
    """A schedule as long as the run: it is made from the plan, and made again when the plan changes."""

    def __init__(self, make: Callable[[dict[str, int]], Schedule]) -> None:
        """`make` is given `total_steps` and `steps_per_epoch`, as far as they are known."""
        self._make = make
        self._made: tuple[dict[str, int], Schedule] | None = None

    def for_plan(self, total_steps: int | None, steps_per_epoch: int | None) -> Schedule:
        """Return the schedule of a run of so many steps."""
        plan = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
        known = {name: steps for name, steps in plan.items() if steps is not None}
        if self._made is None or self._made[0] != known:
            self._made = known, self._make(known)
        return self._made[1]


def plan_schedule(
    scheduler: Schedule | TorchScheduler | PlannedSchedule | str | Mapping[str, Any] | None, config: TrainerConfig
) -> PlannedSchedule | None:
    """Return the schedule that is made from the plan of a run; None if there is none, or if its length is fixed.

    It is the one that `scheduler_type` names, `warmup_cosine` where only `use_scheduler` or `warmup_steps` ask for one.
    Raises ConfigError if that name is unknown, or needs more than a name.
    """
    if isinstance(scheduler, (str, Mapping)):
        return _named_schedule(scheduler)
    if isinstance(scheduler, PlannedSchedule):
        return scheduler
    if scheduler is not None:
        check_scheduler(scheduler)
        if config.use_scheduler is False:
            raise ConfigError("a scheduler is given, but training.use_scheduler is false; leave one of them out")
        return None
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
            f"give the Trainer scheduler=…, a function of the step, for more than a name and warmup_steps"
        ) from error


def _named_schedule(section: str | Mapping[str, Any]) -> PlannedSchedule:
    selection = select_component("scheduler", section, provided=("total_steps", "steps_per_epoch"))

    def make(plan: dict[str, int]) -> Schedule:
        if "total_steps" not in plan and "total_steps" in parameters_of(selection.component.factory)[0]:
            raise ConfigError(
                f"the schedule '{selection.component.name}' is as long as the run, and the loader does not know how "
                f"long that is; set training.max_steps, or give the Trainer scheduler=…"
            )
        schedule: Schedule = build_selection(selection, path="scheduler", provided=plan)
        return schedule

    return PlannedSchedule(make)


def curriculum_callback(
    curriculum: Curriculum | Sequence[Phase],
    task: Task,
    loader: Loader | None,
    val_loader: Loader | None,
    learning_rate: LearningRate,
) -> CurriculumCallback:
    """Return the callback that follows a curriculum; phases alone take the weights of the tasks from the task."""
    if not isinstance(task, SwitchesTasks):
        raise ConfigError(
            f"a curriculum chooses among several tasks, and {type(task).__name__} is one; "
            f"give the Trainer task=MultiTask({{...}}), or leave the curriculum out"
        )
    if not isinstance(curriculum, Curriculum):
        weights = {name: spec.weight for name, spec in task.tasks.items()} if isinstance(task, MultiTask) else None
        curriculum = Curriculum(curriculum, weights)
    streams, val_streams = (
        one.loader if isinstance(one, DeviceLoader) else one for one in (loader, val_loader)
    )  # the batches of any loader may be moved to a device; what is read is the inner one's choice
    return CurriculumCallback(curriculum, task, streams, val_streams, learning_rate)
