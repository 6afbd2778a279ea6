"""Loading a module's state: names without wrappers, and a mismatch explained by parameter name and shape."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.core.calling import unwrap
from etude.core.errors import CheckpointError

_WRAPPER_PARTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Name parts that torch reserves for its wrappers (compile, activation checkpointing, FSDP)."""

_NUM_NAMED = 8


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add.

    >>> clean_name("encoder._orig_mod.layers.0.weight")
    'encoder.layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def clean_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict with the names the user's own module has; the tensors are not copied."""
    return {clean_name(name): value for name, value in unwrap(module).state_dict().items()}


def explain_mismatch(module_state: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Say how a saved state differs from a module's in names and shapes, or return None if it does not.

    >>> explain_mismatch({"fc.weight": torch.zeros(10, 84)}, {"fc.weight": torch.zeros(10, 120)})
    'this checkpoint belongs to another architecture: fc.weight: checkpoint (10, 120), model (10, 84)'
    """
    present = {_identity(value) for name, value in module_state.items() if name in saved} - {None}
    shapes = [
        f"{name}: checkpoint {tuple(saved[name].shape)}, model {tuple(value.shape)}"
        for name, value in module_state.items()
        if name in saved and _shapes_differ(value, saved[name])
    ]
    missing = [
        f"{name}: missing in the checkpoint"
        for name, value in module_state.items()
        if name not in saved and _identity(value) not in present  # a tied weight may have only one of its names
    ]
    unexpected = [f"{name}: not in the model" for name in saved if name not in module_state]
    # A few of each kind tell more than many of one.
    problems = [text for texts in zip_longest(shapes, missing, unexpected) for text in texts if text is not None]
    if not problems:
        return None
    rest = f" (and {len(problems) - _NUM_NAMED} more)" if len(problems) > _NUM_NAMED else ""
    return f"this checkpoint belongs to another architecture: {'; '.join(problems[:_NUM_NAMED])}{rest}"


def load_model_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a saved state into a module in place: its parameters stay the same objects, tied weights stay tied.

    Raises CheckpointError, before anything is changed, if names or shapes differ.
    """
    target = unwrap(module)
    own = target.state_dict()
    current = {clean_name(name): value for name, value in own.items()}
    saved = _without_wrappers(saved, current)
    if problem := explain_mismatch(current, saved):
        raise CheckpointError(problem)
    first_name = _first_names(current, saved)
    state = {}
    for name in own:
        clean = clean_name(name)
        source = clean if clean in saved else first_name[clean]
        _check_tied(source, first_name[clean], saved)
        state[name] = saved[source]
    try:
        target.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"this checkpoint does not fit the model: {' '.join(str(error).split())}") from error


def _without_wrappers(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Clean saved names; `module.` goes only if it is on all of them and the model has no child of that name."""
    cleaned = {clean_name(name): value for name, value in saved.items()}
    prefixed = all(name.startswith("module.") for name in cleaned)
    if prefixed and not any(name.startswith("module.") for name in current):
        return {name.removeprefix("module."): value for name, value in cleaned.items()}
    return cleaned


def _first_names(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Return for each name of the module the first saved name of the same tensor (its own unless it is tied)."""
    first: dict[Any, str] = {}
    for name in current:
        if name in saved:
            first.setdefault(_identity(current[name]) or name, name)
    return {name: first[_identity(value) or name] for name, value in current.items()}


def _check_tied(name: str, first: str, saved: Mapping[str, Any]) -> None:
    if saved[name] is not saved[first] and not torch.equal(saved[name], saved[first]):
        raise CheckpointError(
            f"{first} and {name} are one tensor in this model but differ in the checkpoint; "
            f"build the model without tying them"
        )


def _identity(value: Any) -> tuple[Any, ...] | None:
    """Return what is equal for two names of one tensor and for nothing else, or None where nothing can be tied."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.numel() == 0 or value.is_meta:
        return None
    return value.device, value.data_ptr(), value.shape, value.stride()


def _shapes_differ(own: Any, saved: Any) -> bool:
    if not isinstance(own, Tensor) or not isinstance(saved, Tensor) or is_lazy(own):
        return False
    return own.shape != saved.shape
