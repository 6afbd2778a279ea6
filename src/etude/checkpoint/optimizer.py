"""Optimizer state by parameter name: readable, and independent of the order of parameters."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from etude.checkpoint.optimizer_needs import check_settings, check_state, needed_state
from etude.checkpoint.saved_tensor import own_part, whole
from etude.checkpoint.trust import check_kind, record_of
from etude.core.errors import CheckpointError
from etude.core.model import clean_name, unwrap
from etude.distributed.shards import is_sharded, model_param, sharded_like
from etude.optim.device import DeviceOptimizer
from etude.optim.eager import without_compiler
from etude.optim.several import Optimizers, owner_of

_NUM_NAMED = 8

_TREE = record_of(
    "OptimizerState",
    {
        "optimizer": str,
        "shapes": dict[str, tuple[int, ...]],
        "groups": list[record_of("Group", {"params": list[str], "settings": dict[str, Any]})],  # type: ignore[misc]
        "state": dict[str, dict[str | int, Any]],
        "shared": dict[str | int, Any],
        "other": dict[str, Any],
    },
)


@without_compiler()
def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state of an optimizer as a tree: per parameter by its name in `model`, and per group.

    The tensors are not copied. A parameter that is not in `model` is named by its index. An alias of a local shard
    (`etude.distributed.shards`) has the name and shape of its parameter, and states like it are DTensors. Raises
    CheckpointError if a state of such a parameter has another shape: it would be that of one rank.
    """
    saved = optimizer.state_dict()
    groups = _named_groups(optimizer, model)
    named = {name: parameter for group in groups for name, parameter in group.items()}
    indices = (index for group in saved["param_groups"] for index in group["params"])
    name_of = dict(zip(indices, named, strict=True))
    owners = {name: owner_of(optimizer, place) for place, group in enumerate(groups) for name in group}
    return {
        "optimizer": _kind(optimizer),
        "shapes": {name: tuple(model_param(parameter).shape) for name, parameter in named.items()},
        "groups": [
            {"params": list(names), "settings": _settings(group)}
            for group, names in zip(saved["param_groups"], groups, strict=True)
        ],
        "state": {
            name_of[key]: {
                kind: _sharded(named[name_of[key]], one, kind, name_of[key], owners[name_of[key]])
                for kind, one in value.items()
            }
            for key, value in saved["state"].items()
            if key in name_of
        },
        "shared": {key: value for key, value in saved["state"].items() if key not in name_of},
        "other": _without_bytes(_others(saved)),
    }


def _others(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key not in ("state", "param_groups")}


def _without_bytes(value: Any) -> Any:
    """Return what an optimizer saves about itself with the hash of bytes instead of them.

    Bytes may be a pickle, as heavyball's are, which the optimizer would run when it is loaded. A file has none, so that
    loading one runs no code of it.
    """
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    return {key: _without_bytes(item) for key, item in value.items()} if isinstance(value, dict) else value


def _with_bytes(saved: Any, own: Any, path: str = "optimizer.other") -> Any:
    """Return what was saved, with the bytes of the optimizer that loads it; raise CheckpointError if they differ."""
    if isinstance(own, bytes):
        if saved != _without_bytes(own):
            raise CheckpointError(f"{path} differs from the saved one; make the optimizer as in the saved run")
        return own
    if not (isinstance(saved, dict) and isinstance(own, dict)):
        return saved
    return {key: _with_bytes(item, own.get(key), f"{path}.{key}") for key, item in saved.items()}


def _sharded(parameter: Tensor, value: Any, kind: str, name: str, owner: Optimizer) -> Any:
    """Return a state of a parameter, divided among ranks as the parameter is; or whole if all ranks have it."""
    if not isinstance(value, Tensor) or (isinstance(owner, DeviceOptimizer) and kind in owner.whole_states):
        return value
    found = sharded_like(parameter, value)
    if found is value and is_sharded(model_param(parameter)) and value.dim():
        raise CheckpointError(
            f"cannot save optimizer.state.{name}.{kind}: its shape {tuple(value.shape)} is not that of its parameter, "
            "which is divided among processes; use another optimizer"
        )
    return found


@without_compiler()
def load_optimizer_state(optimizer: Optimizer, model: nn.Module, tree: Mapping[str, Any]) -> None:
    """Load what `optimizer_state` returned, exactly: dtypes, devices and memory layout as in training.

    Raises CheckpointError, before anything changes, if the optimizer or its parameters differ from those saved, or if
    a state is missing or has a wrong shape or dtype. The latter is checked only for torch's own optimizers.
    """
    check_optimizer(optimizer, model, tree)
    groups = _named_groups(optimizer, model)
    named = {name: parameter for group in groups for name, parameter in group.items()}
    index_of = {name: index for index, name in enumerate(named)}
    settings = [_settings(group) for group in optimizer.param_groups]
    state = {name: _copy(value, named[name]) for name, value in tree["state"].items()}
    other = _with_bytes(_copy(tree["other"]), _others(optimizer.state_dict())) if tree["other"] else {}
    optimizer.load_state_dict(
        {
            **other,
            "state": {**_copy(tree["shared"]), **{index_of[name]: value for name, value in state.items()}},
            "param_groups": [
                # Settings that the saved state lacks keep their current value, and so does where steps are counted: a
                # run on a GPU counts them there, which torch refuses on a CPU.
                {
                    **own,
                    **_settings(saved["settings"]),
                    **{key: own[key] for key in ("capturable",) if key in own},
                    "params": [index_of[name] for name in names],
                }
                for own, saved, names in zip(settings, _saved_groups(groups, tree), groups, strict=True)
            ],
        }
    )
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        for key, value in before.items():
            if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                group[key] = group[key].to(value.device)
    for name, values in state.items():
        _restore_types(optimizer.state[named[name]], values)


def check_optimizer(optimizer: Optimizer, model: nn.Module, tree: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `tree` is the state of such an optimizer with these parameters and groups."""
    check_kind(_TREE, tree, "optimizer")
    if tree["optimizer"] != _kind(optimizer):
        raise CheckpointError(
            f"the checkpoint holds the state of {tree['optimizer']}, the optimizer is {_kind(optimizer)}; "
            f"use the same optimizer, or load the model alone"
        )
    groups, saved = _named_groups(optimizer, model), tree["shapes"]
    named = {name: parameter for group in groups for name, parameter in group.items()}
    own = {
        name: saved.get(name, ()) if is_lazy(one) else tuple(model_param(one).shape) for name, one in named.items()
    }
    problems = [
        *(f"{name}: not in the checkpoint" for name in own if name not in saved),
        *(f"{name}: not in the optimizer" for name in saved if name not in own),
        *(f"{n}: checkpoint {saved[n]}, model {own[n]}" for n in own if n in saved and saved[n] != own[n]),
    ]
    if problems:
        rest = f" (and {len(problems) - _NUM_NAMED} more)" if len(problems) > _NUM_NAMED else ""
        raise CheckpointError(
            f"the saved optimizer has different parameters: {'; '.join(problems[:_NUM_NAMED])}{rest}"
        )
    strangers = [name for name in tree["state"] if name not in own] + [
        i for i in tree["shared"] if i in range(len(own))
    ]
    if strangers:
        raise CheckpointError(
            f"optimizer.state has an entry for {strangers[0]!r:.60}, which the optimizer does not have"
        )
    for i, (group, matching) in enumerate(zip(groups, _saved_groups(groups, tree), strict=True)):
        _check_group(optimizer, i, group, _settings(matching["settings"]), tree["state"])


def _check_group(
    optimizer: Optimizer,
    place: int,
    group: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    states: Mapping[str, Mapping[Any, Any]],
) -> None:
    """Compare settings and states of one group with those the optimizer has and needs."""
    own, part = _settings(optimizer.param_groups[place]), f"optimizer.groups.{place}.settings"
    check_settings(saved, own, part)
    needed: dict[Any, dict[str, Any] | None] = {}
    for name, parameter in group.items():
        if is_lazy(parameter) or not states.get(name):
            continue
        form = (tuple(model_param(parameter).shape), parameter.dtype)
        if form not in needed:
            like = model_param(parameter)
            needed[form] = needed_state(owner_of(optimizer, place), {**own, **saved}, like)
        if (wanted := needed[form]) is not None:
            check_state(states[name], wanted, f"optimizer.state.{name}")


def _kind(optimizer: Optimizer) -> str:
    """Return the classes of an optimizer and of those it is made of: `AdamW`, `SGD + AdamW`, `Lookahead(AdamW)`."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizers):
        return name
    parts = " + ".join(map(_kind, optimizer.optimizers))
    return parts if type(optimizer) is Optimizers else f"{name}({parts})"


def _named_groups(optimizer: Optimizer, model: nn.Module) -> list[dict[str, Tensor]]:
    """Return each group's parameters by name, in the optimizer's order."""
    names = {id(parameter): clean_name(name) for name, parameter in unwrap(model).named_parameters()}
    return [
        {
            names.get(id(model_param(parameter)), f"groups.{i}.params.{j}"): parameter
            for j, parameter in enumerate(group["params"])
        }
        for i, group in enumerate(optimizer.param_groups)
    ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _saved_groups(groups: Sequence[Mapping[str, Tensor]], tree: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return for each group of the optimizer the saved one with the same parameters."""
    left = list(tree["groups"])
    matching = []
    for names in groups:
        found = next((i for i, saved in enumerate(left) if set(saved["params"]) == set(names)), None)
        if found is None:
            some = ", ".join(list(names)[:_NUM_NAMED]) + (" …" if len(names) > _NUM_NAMED else "")
            raise CheckpointError(
                "the saved optimizer groups its parameters differently: no saved group has exactly "
                f"{some or 'none'}; build the parameter groups as in the saved run"
            )
        matching.append(left.pop(found))
    if left:
        raise CheckpointError(
            f"the saved optimizer has {len(tree['groups'])} parameter groups, this one {len(groups)}; "
            f"build the parameter groups as in the saved run"
        )
    return matching


def _copy(value: Any, parameter: Tensor | None = None) -> Any:
    """Copy the tensors of a tree, so that further training does not change it, in the layout of the parameter."""
    if isinstance(value, dict):
        return {key: _copy(item, parameter) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, parameter) for item in value)
    if not isinstance(value, Tensor):
        return value
    if parameter is None or tuple(value.shape) != tuple(model_param(parameter).shape):
        return whole(value).detach().clone()
    value = own_part(value, model_param(parameter))
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _restore_types(loaded: Any, saved: Any) -> None:
    """Undo the cast of torch's loader, which gives floating-point state the dtype of the parameter."""
    for key, value in saved.items() if isinstance(saved, dict) else enumerate(saved):
        current = loaded.get(key) if isinstance(loaded, dict) else loaded[key]
        if isinstance(value, Tensor) and isinstance(current, Tensor) and current.dtype != value.dtype:
            loaded[key] = value.to(current.device)
        elif isinstance(value, (dict, list)) and type(current) is type(value):
            _restore_types(current, value)
