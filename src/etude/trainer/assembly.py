"""Parts of a run made from what the user of a `Trainer` gives: config, optimizer, schedule, curriculum."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from etude.callbacks import CurriculumCallback
from etude.core import ConfigError, Loader, Task, TrainingError
from etude.core.terms import SwitchesTasks
from etude.curriculum import Curriculum, Phase
from etude.engine.accumulation import GradientAccumulator
from etude.engine.schedule import LearningRate
from etude.losses import MultiTask
from etude.optim import AdamW, Schedule, warmup_cosine
from etude.trainer.config import TRAINING_ALIASES, ActivationCheckpointing, TrainerConfig
from etude.trainer.feeding import DeviceLoader

TorchScheduler = torch.optim.lr_scheduler.LRScheduler


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
    if not isinstance(config, TrainerConfig):
        from etude.config import canonical_keys, validate_section

        data = canonical_keys(dict(config or {}), TRAINING_ALIASES, "training", None)
        config = validate_section(TrainerConfig, data, path="training", document=None)
    changes: dict[str, Any] = {}
    if device is not None:
        changes["device"] = str(device)
    if compile_model is not None:
        changes["compile_model"] = compile_model
    if use_amp is not None:
        changes["use_mixed_precision"] = use_amp
    return config.model_copy(update=changes)


def blocks_to_recompute(setting: bool | str | ActivationCheckpointing) -> dict[str, Any]:
    """Return the arguments of `recompute_activations`."""
    if isinstance(setting, ActivationCheckpointing):
        return {"blocks": setting.blocks, "every": setting.every}
    return {"blocks": setting} if isinstance(setting, str) else {}


def make_optimizer(optimizer: Any, model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Return the optimizer itself, one made by a function of the parameters, or AdamW."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ConfigError("the model has no parameters that require gradients: there is nothing to train")
    if isinstance(optimizer, torch.optim.Optimizer):
        mine = {id(param) for param in params}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise TrainingError(
                "the optimizer holds none of the model's parameters: build it from model.parameters()"
            )
        return optimizer
    groups: Any = params
    if isinstance(model, GroupsParameters) and len(found := model.parameter_groups()) > 1:
        groups = found
    if optimizer is not None:
        made: torch.optim.Optimizer = optimizer(groups)
        return made
    chosen: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    return AdamW(groups, **{key: value for key, value in chosen.items() if value is not None})


def make_schedule(
    scheduler: Schedule | TorchScheduler | None, config: TrainerConfig, total_steps: int | None
) -> Schedule | None:
    """Return the schedule as a function of the step; None if there is none or if it is one of torch."""
    if isinstance(scheduler, TorchScheduler):
        return None
    if scheduler is None and config.warmup_steps is not None:
        if total_steps is None:
            raise ConfigError("training.warmup_steps needs a run with an end: set epochs or max_steps")
        return warmup_cosine(total_steps=total_steps, warmup_steps=config.warmup_steps)
    return scheduler


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
