"""What several tasks need of model, optimizer and data before training: their weighting is part of the first two."""

import logging
from collections.abc import Mapping

import torch
from torch import nn

from etude.core import ConfigError, Loader
from etude.data import DataLoader, StreamLoader, Streams, make_loader
from etude.data.sources.adapters import ForeignLoader
from etude.multitask.model import MultiTaskModel
from etude.multitask.spec import TaskSpec, check_streams
from etude.multitask.weighting import Weighting
from etude.optim.eager import without_compiler

logger = logging.getLogger("etude")


def join_weighting(weighting: Weighting, model: nn.Module) -> None:
    """Make the weighting of the tasks part of their model.

    Raises ConfigError if the model cannot have one, or has another one.
    """
    name = type(weighting).__name__
    if not isinstance(model, MultiTaskModel):
        raise ConfigError(
            f"{name} weighs the tasks of a MultiTaskModel, but the model is a {type(model).__name__}; "
            f"give MultiTaskModel(trunk, heads)"
        )
    if model.weighting is None:
        model.weighting = weighting
    elif model.weighting is not weighting:
        raise ConfigError(
            f"the model has the {type(model.weighting).__name__} of another task already; make a model for this one"
        )


def train_weighting(weighting: Weighting, optimizer: torch.optim.Optimizer) -> None:
    """Add parameters of the weighting that the optimizer does not have, without weight decay.

    Raises ConfigError if a torch scheduler has the optimizer already: it would know nothing of them.
    """
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    wanted = [param for param in weighting.parameters() if param.requires_grad]
    name = type(weighting).__name__
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
            f"be added; call task.join(model) first and make it with model.parameter_groups()"
        )
    if missing:
        with without_compiler():
            optimizer.add_param_group({"params": missing, "weight_decay": 0.0})


def holds_same_keys(loader: Loader | None) -> bool:
    """Whether all batches of a stream hold the same keys, so that the first shows labels that are missing."""
    return isinstance(loader, DataLoader) or _is_shuffled_by_torch(loader)


def check_streams_of(tasks: Mapping[str, TaskSpec], loader: Loader | None) -> None:
    """Raise TrainingError for labels that no stream has."""
    if isinstance(loader, StreamLoader):
        alone = [Streams({name: part}) for name, part in loader.data.parts.items()]
        check_streams(tasks, [next(iter(make_loader(streams, 1))) for streams in alone])


def warn_of_steps(weighting: Weighting, loader: Loader | None, accumulation_steps: int) -> None:
    """Warn if a weighting compares tasks that never share a step."""
    if weighting.needs == "nothing" or not isinstance(loader, StreamLoader):
        return
    if loader.data.draw == "alternate" and accumulation_steps == 1:
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
