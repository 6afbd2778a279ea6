"""Several tasks in a trainer: their weighting becomes part of the model, its parameters part of the optimizer."""

import torch
from torch import nn

from etude.core import ConfigError, Task
from etude.losses import MultiTask
from etude.models import MultiTaskModel


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


def train_weighting(optimizer: torch.optim.Optimizer, task: Task) -> None:
    """Add parameters of the weighting that the optimizer does not have, without weight decay."""
    if not isinstance(task, MultiTask) or task.weighting is None:
        return
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [param for param in task.weighting.parameters() if param.requires_grad and id(param) not in known]
    if missing:
        optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
