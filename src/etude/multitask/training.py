"""Several tasks in a trainer: their weighting becomes part of the model, its parameters part of the optimizer."""

import logging

import torch
from torch import nn

from etude.core import ConfigError, Loader, Task
from etude.data import DataLoader, StreamLoader
from etude.data.foreign import ForeignLoader
from etude.engine.accumulation import GradientAccumulator
from etude.multitask.model import MultiTaskModel
from etude.multitask.spec import check_streams
from etude.multitask.task import MultiTask
from etude.multitask.weighting import CombinesGradients, WatchesGradients, WatchesUpdates

logger = logging.getLogger("etude")


def join_weighting(model: nn.Module, task: Task) -> None:
    """Make the weighting of the tasks part of their model, so that it is saved, moved and trained with it.

    Raises ConfigError if the model cannot have one, or has another one.
    """
    if not isinstance(task, MultiTask) or task.weighting is None:
        return
    name = type(task.weighting).__name__
    if not isinstance(model, MultiTaskModel):
        raise ConfigError(
            f"{name} weighs the tasks of a MultiTaskModel, but the model is a {type(model).__name__}; "
            f"give MultiTaskModel(trunk, heads)"
        )
    if model.weighting is None:
        model.weighting = task.weighting
    elif model.weighting is not task.weighting:
        raise ConfigError(
            f"the model and the task each have a {name} of their own; give both the same one, or only one"
        )


def check_data(task: Task, loader: Loader | None, accumulator: GradientAccumulator) -> None:
    """Raise TrainingError for labels that no stream has; warn if a weighting compares tasks that never meet in a step.

    Of data without streams the first batch will show labels that it lacks.
    """
    if not isinstance(task, MultiTask):
        return
    task.alike = isinstance(loader, (DataLoader, StreamLoader)) or _is_shuffled_by_torch(loader)
    if isinstance(loader, StreamLoader):
        check_streams(
            task.tasks, [next(iter(StreamLoader({name: part}, 1))) for name, part in loader.data.parts.items()]
        )
    weighting = task.weighting
    compares = isinstance(weighting, (CombinesGradients, WatchesGradients, WatchesUpdates))
    if (
        compares
        and isinstance(loader, StreamLoader)
        and loader.data.draw == "alternate"
        and accumulator.steps_at(0) == 1
    ):
        logger.warning(
            "%s compares tasks, but with `draw: alternate` a step sees one stream only; "
            "set data.draw to together, or training.grad_accum_steps above 1",
            type(weighting).__name__,
        )


def _is_shuffled_by_torch(loader: Loader | None) -> bool:
    """Whether a loader of torch's puts samples together as they come: then all of them must hold the same keys."""
    source = loader.source if isinstance(loader, ForeignLoader) else None
    return (
        isinstance(source, torch.utils.data.DataLoader)
        and source.collate_fn is torch.utils.data.default_collate
        and type(source.sampler) in (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        and type(source.batch_sampler) is torch.utils.data.BatchSampler
    )


def train_weighting(optimizer: torch.optim.Optimizer, task: Task) -> None:
    """Add parameters of the weighting that the optimizer does not have, without weight decay.

    Raises ConfigError if a torch scheduler has the optimizer already: it would know nothing of them.
    """
    if not isinstance(task, MultiTask) or task.weighting is None:
        return
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    wanted = [param for param in task.weighting.parameters() if param.requires_grad]
    name = type(task.weighting).__name__
    if any(groups[id(param)].get("weight_decay") for param in wanted if id(param) in groups):
        logger.warning(
            "the optimizer decays the parameters of %s, which pulls the tasks towards equal weights; "
            "make it with model.parameter_groups()",
            name,
        )
    missing = [param for param in wanted if id(param) not in groups]
    if missing and getattr(optimizer.step, "_wrapped_by_lr_sched", False):  # as torch's schedulers leave it
        raise ConfigError(
            f"the optimizer has no parameters of {name} and a torch scheduler has taken it over, so that they cannot "
            f"be added; make it with MultiTaskModel(trunk, heads, weighting).parameter_groups()"
        )
    if missing:
        optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
