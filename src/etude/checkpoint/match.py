"""Loading a module's state: mismatches are reported by parameter name and shape, before anything changes."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.checkpoint.frozen import with_own
from etude.checkpoint.saved_tensor import fill, own_part
from etude.checkpoint.trust import same_category
from etude.core.errors import CheckpointError
from etude.core.model import clean_name, unwrap
from etude.distributed.shards import is_sharded
from etude.distributed.sharing import separate_buffers

_NUM_NAMED = 8


def explain_mismatch(module_state: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Describe how a saved state differs from a module's in names, shapes and dtypes; None if it does not.

    Floats of another width are accepted and converted.

    >>> explain_mismatch({"fc.weight": torch.zeros(10, 84)}, {"fc.weight": torch.zeros(10, 120)})
    'this checkpoint belongs to another architecture: fc.weight: checkpoint (10, 120), model (10, 84)'
    """
    present = {_identity(value) for name, value in module_state.items() if name in saved} - {None}
    shapes = [
        f"{name}: {difference}"
        for name, value in module_state.items()
        if name in saved and (difference := _difference(value, saved[name]))
    ]
    missing = [
        f"{name}: missing in the checkpoint"
        for name, value in module_state.items()
        # a tied weight may be saved under only one of its names
        if name not in saved and _identity(value) not in present
    ]
    unexpected = [f"{name}: not in the model" for name in saved if name not in module_state]
    # Examples of each kind are more useful than many of one kind.
    problems = [text for texts in zip_longest(shapes, missing, unexpected) for text in texts if text is not None]
    if not problems:
        return None
    rest = f" (and {len(problems) - _NUM_NAMED} more)" if len(problems) > _NUM_NAMED else ""
    return f"this checkpoint belongs to another architecture: {'; '.join(problems[:_NUM_NAMED])}{rest}"


def load_model_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a saved state into a module in place: parameters stay the same objects, tied weights stay tied.

    Of parameters that are divided among ranks (DTensor) this rank's part is loaded. Raises CheckpointError if names,
    shapes or dtypes differ, before anything changes, or if the module raises.
    """
    state = _fitting_state(module, saved)
    for name, own in unwrap(module).state_dict(keep_vars=True).items():
        if is_sharded(own):
            if state[name] is not own:
                fill(own, state[name])
            state[name] = own.detach()
    separate_buffers(unwrap(module))
    device = next((tensor.device for tensor in unwrap(module).parameters()), None)
    for name, (owner, key, tensor) in _empty_buffers(module).items():
        if name in state:
            like = torch.empty_like(state[name], device=device) if tensor is None else tensor
            owner._buffers[key] = like.new_empty(state[name].shape)
    try:
        unwrap(module).load_state_dict(state, strict=True)
    except Exception as error:  # a module may define its own loading
        raise CheckpointError(f"this checkpoint does not fit the model: {' '.join(str(error).split())}") from error


def check_model_state(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `load_model_state` would find different names, shapes or dtypes."""
    _fitting_state(module, saved)


def _fitting_state(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state under the names of the module."""
    own = unwrap(module).state_dict(keep_vars=True)
    current = {clean_name(name): value for name, value in own.items()}
    saved = with_own(_without_wrappers(saved, current), current)
    filled = {
        name: saved[clean_name(name)]
        for name, (_, _, tensor) in _empty_buffers(module).items()
        if _can_fill(tensor, saved.get(clean_name(name)))
    }
    grown = {clean_name(name) for name in filled}
    if problem := explain_mismatch(_without(current, grown), _without(saved, grown)):
        raise CheckpointError(problem)
    first_name = _first_names(current, saved)
    state = {}
    for name in own:
        clean = clean_name(name)
        source = clean if clean in saved else first_name[clean]
        _check_tied(source, first_name[clean], saved, current[clean])
        state[name] = saved[source]
    return state | filled


def _empty_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor | None]]:
    """Return the buffers without values, empty or None, by name: buffers that grow in training may have any shape."""
    return {
        f"{path}.{key}" if path else key: (owner, key, tensor)
        for path, owner in unwrap(module).named_modules()
        for key, tensor in owner._buffers.items()
        if key not in owner._non_persistent_buffers_set
        and (tensor is None or (not is_lazy(tensor) and tensor.numel() == 0))
    }


def _can_fill(tensor: Tensor | None, saved: Any) -> bool:
    return isinstance(saved, Tensor) and (tensor is None or same_category(saved.dtype, tensor.dtype))


def _without(state: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


def _without_wrappers(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Clean saved names; `module.` is removed only if all names have it and the model has no child of that name."""
    cleaned = {clean_name(name): value for name, value in saved.items()}
    prefixed = all(name.startswith("module.") for name in cleaned)
    if prefixed and not any(name.startswith("module.") for name in current):
        return {name.removeprefix("module."): value for name, value in cleaned.items()}
    return cleaned


def _first_names(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Return for each name of the module the first saved name of the same tensor (its own unless tied)."""
    first: dict[Any, str] = {}
    for name in current:
        if name in saved:
            first.setdefault(_identity(current[name]) or name, name)
    return {name: first[_identity(value) or name] for name, value in current.items()}


def _check_tied(name: str, first: str, saved: Mapping[str, Any], own: Any) -> None:
    one, other = saved[name], saved[first]
    if one is not other and (one.dtype != other.dtype or not torch.equal(own_part(one, own), own_part(other, own))):
        raise CheckpointError(
            f"{first} and {name} are tied in this model but differ in the checkpoint; build the model without tying "
            "them"
        )


def _identity(value: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal only for two names of one tensor, or None if it cannot be tied."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.numel() == 0 or value.is_meta:
        return None
    if is_sharded(value):
        return (id(value),)  # a local shard may be empty
    return value.device, value.data_ptr(), value.shape, value.stride()


def _difference(own: Any, saved: Any) -> str | None:
    if not isinstance(own, Tensor):
        return None
    if not isinstance(saved, Tensor):
        return f"checkpoint {type(saved).__name__}, model tensor"
    if not is_lazy(own) and own.shape != saved.shape:
        return f"checkpoint {tuple(saved.shape)}, model {tuple(own.shape)}"
    return None if same_category(saved.dtype, own.dtype) else f"checkpoint {saved.dtype}, model {own.dtype}"
