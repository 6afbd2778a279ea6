"""The state that an optimizer needs per parameter, found by running one step of such an optimizer.

Foreach and fused kernels do not check shapes: they would write past the end of a state of another shape. So the saved
state is compared with the state that the optimizer itself creates.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from etude.checkpoint.trust import check_tensor
from etude.core.errors import CheckpointError
from etude.optim.device import DeviceOptimizer
from etude.optim.eager import take_step, without_compiler

_KERNELS = {"fused": False, "foreach": False, "capturable": False, "differentiable": False}
"""Settings that do not change the state, and do not all work on the CPU."""


def check_settings(saved: Mapping[str, Any], own: Mapping[str, Any], part: str) -> None:
    """Raise CheckpointError unless every saved setting has the type of the optimizer's own setting."""
    for key, value in saved.items():
        if key in own and not _same_kind(value, own[key]):
            raise CheckpointError(f"{part}.{key}: found {value!r:.60}, the optimizer has {own[key]!r:.60}")


def needed_state(optimizer: Optimizer, settings: Mapping[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return the state for a parameter under `settings`; tensors, except for counters, have no data.

    None if it is unknown: the optimizer is not torch's or etude's, or its step needs more than gradients.
    """
    base = type(optimizer)
    if not isinstance(optimizer, DeviceOptimizer):
        base = next(cls for cls in base.__mro__ if cls.__module__.startswith("torch.optim"))
        if base is Optimizer or not type(optimizer).step.__module__.startswith(("torch.optim", "etude.optim.direct")):
            return None
    try:
        return _try_step(base, settings, parameter)
    except Exception:  # any error means that the state is unknown
        return None


def check_state(saved: Mapping[Any, Any], needed: Mapping[str, Any], part: str) -> None:
    """Raise CheckpointError unless everything needed is present with the right shape and dtype."""
    for key, value in needed.items():
        place = f"{part}.{key}"
        if key not in saved:
            raise CheckpointError(f"{place}: is missing")
        if not isinstance(value, Tensor):
            continue
        if value.is_meta:
            check_tensor(saved[key], value, place)
            continue
        check_tensor(saved[key], value.to(getattr(saved[key], "dtype", value.dtype)), place)
        count = float(saved[key])
        if not saved[key].is_floating_point() or not math.isfinite(count) or count < 0:
            raise CheckpointError(f"{place}: found {count} as {saved[key].dtype}, expected a number of at least 0")


def _try_step(base: type, settings: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Step with a small parameter whose dimensions all have different sizes, and infer the shapes of the state."""
    # a scalar gets a dimension too, to distinguish its state from counters
    sizes = range(2, 2 + max(1, parameter.dim()))
    like = torch.zeros(*sizes, dtype=parameter.dtype, requires_grad=True)
    like.grad = torch.ones_like(like)
    known = inspect.signature(base).parameters
    arguments = {key: _plain(value) for key, value in {**settings, **_KERNELS}.items() if key in known}
    with without_compiler():
        optimizer = base([like], **arguments)
    take_step(optimizer)
    whole = {1: 1, **dict(zip(sizes, parameter.shape, strict=False))}

    def enlarged(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        shape = [whole[size] for size in value.shape] if parameter.dim() else []
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return {key: enlarged(value) for key, value in optimizer.state[like].items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, Tensor) else value


def _same_kind(saved: Any, own: Any) -> bool:
    if own is None or isinstance(own, bool):
        return saved is None or isinstance(saved, bool) or (own is None and not isinstance(saved, (dict, list)))
    if isinstance(own, (int, float, Tensor)):
        return _is_number(saved)
    if isinstance(own, (tuple, list)):  # a config file has lists where a signature has tuples
        is_sequence = isinstance(saved, (tuple, list)) and len(saved) == len(own)
        return is_sequence and all(map(_same_kind, saved, own))
    return isinstance(saved, type(own))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_real = not value.is_complex() and value.dtype != torch.bool  # settings may be counters
        return value.dim() == 0 and is_real and bool(value.isfinite())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
