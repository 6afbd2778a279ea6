"""Which settings of an optimizer count when a checkpoint is loaded: its own, or those of the checkpoint."""

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from etude.callbacks import LRSchedule
from etude.callbacks.swapped import OptimizerWeights
from etude.checkpoint.optimizer_needs import needed_state
from etude.core import ConfigError
from etude.distributed.shards import model_param
from etude.engine.callback import Callback
from etude.optim.device import DeviceOptimizer
from etude.optim.schedule_free import HasModes
from etude.optim.scheduled import Setting, set_setting
from etude.optim.several import optimizers_in, owner_of

logger = logging.getLogger("etude")

_OF_KERNELS = ("fused", "foreach", "capturable")
"""Arguments of optimizers that are chosen for the device."""
_OF_STEPPED = ("lr", "momentum", "betas")
"""Arguments of optimizers that a torch scheduler may change; it has a warning of its own."""


@contextmanager
def hyperparameters(
    optimizer: torch.optim.Optimizer, callbacks: Iterable[Callback], *, keep: bool | None
) -> Iterator[None]:
    """Load a checkpoint in this context; with `keep`, learning rate, weight decay and so on do not change.

    These are arguments of the optimizer. What else a group holds is state, such as a count of steps. With None they
    are those of the checkpoint, and a warning names those that change.
    """
    known = [_arguments(optimizer, place) for place in range(len(optimizer.param_groups))]
    mine = [
        {key: value for key, value in group.items() if key in names or key.startswith("initial_")}
        for group, names in zip(optimizer.param_groups, known, strict=True)
    ]
    is_stepped = any(isinstance(one, LRSchedule) for one in callbacks)  # it changes rates, and may change momentum
    if keep and is_stepped:
        raise ConfigError(
            "keep_hyperparameters cannot change the rates inside a torch scheduler; use a function of the step, "
            "such as etude.optim.cosine"
        )
    yield
    moved = _OF_STEPPED if is_stepped else ()
    if keep is None and (changed := _differences(mine, optimizer.param_groups, moved)):
        logger.warning(
            "training continues with the settings of the checkpoint: %s; to change them, load it with "
            "load_checkpoint(path, keep_hyperparameters=True)%s",
            ", ".join(changed),
            " and use a function of the step in place of the torch scheduler" * is_stepped,
        )
    if not keep:
        return
    before = _shares_of_averages(optimizer)
    for group, settings in zip(optimizer.param_groups, mine, strict=True):
        for key in [one for one in group if one.startswith("initial_")]:  # base values of the checkpoint
            del group[key]
        group.update(settings)
    _complete_states(optimizer)
    if _shares_of_averages(optimizer) != before:
        for one in callbacks:
            if isinstance(one, OptimizerWeights):
                one.begin_again()  # the optimizer computes them from its averages


def _differences(
    given: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], moved: Collection[str] = ()
) -> list[str]:
    """Return "lr 0.1, not 0.2" for the settings that loading has changed, each once, without those `moved`."""
    pairs = [(_base_settings(one, own), _base_settings(own, own)) for own, one in zip(given, loaded, strict=True)]
    return list(
        dict.fromkeys(
            f"{key} {now[key]}, not {before[key]}"
            for now, before in pairs
            for key in before
            if now[key] != before[key] and key not in moved
        )
    )


def _base_settings(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return settings as words, those that have a schedule without its factor."""
    found = {key: group[key] for key in names if not key.startswith("initial_") and key not in _OF_KERNELS}
    for key in ("lr", *get_args(Setting)):
        if f"initial_{key}" in group:
            set_setting(found, key, group[f"initial_{key}"])
    return {key: _in_words(value) for key, value in found.items()}


def _in_words(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_in_words, value))})"
    is_number = isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
    return f"{float(value):.4g}" if is_number else str(value)


def _shares_of_averages(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the settings by which optimizers with averages compute the weights of training from them."""
    groups = [group for one in optimizers_in(optimizer) if isinstance(one, HasModes) for group in one.param_groups]
    return [group["betas"][0] if "betas" in group else group.get("momentum") for group in groups]


def _complete_states(optimizer: torch.optim.Optimizer) -> None:
    """Begin the states that settings need and a checkpoint lacks, such as those of `amsgrad`, with zeros."""
    for place, group in enumerate(optimizer.param_groups):
        owner = owner_of(optimizer, place)
        begun = [param for param in group["params"] if owner.state.get(param)]
        if not begun or isinstance(owner, DeviceOptimizer):  # these begin them by themselves
            continue
        settings = {key: value for key, value in group.items() if key != "params"}
        needed = needed_state(owner, settings, model_param(begun[0])) or {}
        for key in [key for key, like in needed.items() if isinstance(like, Tensor) and like.is_meta]:
            for param in begun:
                owner.state[param].setdefault(key, torch.zeros_like(param, requires_grad=False))


def _arguments(optimizer: torch.optim.Optimizer, place: int) -> set[str]:
    """Return the arguments of the optimizer that updates a group, also those that it passes on to its base classes."""
    kinds = [one for one in type(owner_of(optimizer, place)).__mro__ if issubclass(one, torch.optim.Optimizer)]
    return {name for one in kinds for name in inspect.signature(one).parameters} - {"params"}
