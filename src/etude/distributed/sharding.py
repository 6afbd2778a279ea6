"""Sharded models: FSDP2 over blocks, and the local shards that an optimizer updates.

After sharding, the parameters of a model are DTensors. An optimizer gets plain parameters that share memory with their
local shards: its kernels are those of an unsharded model, and an update by element is the same on a shard as on the
whole. What needs all elements, the norm of the gradients, is summed over processes here.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Partial, Replicate

from etude.core.blocks import modules_matching, repeated_blocks
from etude.core.deferred import Recording, key_of, weights_of
from etude.core.errors import ConfigError
from etude.distributed.mesh import Layout
from etude.distributed.parallel import reshard, sparse_layers
from etude.distributed.shards import is_sharded, local_of, part_of
from etude.distributed.tensor_parallel import divide_layers, tied_names
from etude.distributed.world import World, run_collective

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LocalParameter(nn.Parameter):
    """The local shard of a parameter, as an optimizer sees it (see `shards.py`)."""

    sharded: DTensor
    """The parameter of the model."""


def divide_model(model: nn.Module, layout: Layout, precision: str, unsharded: Collection[nn.Parameter] = ()) -> None:
    """Divide a model over the processes of a layout, in place; `unsharded` parameters stay whole.

    So do those that torch cannot shard: single numbers, empty ones, and those of another dtype than most beside them.
    All processes must call this together, with the same weights. Raises ConfigError if the model cannot be divided so.
    """
    if sparse := sparse_layers(model):
        raise ConfigError(
            f"{next(iter(sparse))} has sparse gradients, which cannot be divided over processes; create it with "
            "sparse=False, or use parallel: ddp"
        )
    if layout.tensor_mesh is not None:
        divide_layers(model, layout.tensor_mesh, layout.settings.tensor_plan)
    if (mesh := layout.shard_mesh) is None:
        return
    if numbers := [name for name, param in model.named_parameters() if param.is_complex()]:
        raise ConfigError(f"{numbers[0]} is complex, which torch cannot shard; use parallel: ddp")
    for param in model.parameters():  # FSDP2 shards contiguous memory only
        if not param.is_contiguous():
            param.data = param.data.contiguous()
    settings = layout.settings
    chosen = precision if settings.param_dtype == "auto" else settings.param_dtype
    param_dtype = None if chosen == "fp32" else DTYPES[chosen]
    # None sums in the dtype of gathered weights: fp32 is more than bf16 weights need, but less than float64 ones do.
    is_double = param_dtype is None and any(param.dtype is torch.float64 for param in model.parameters())
    reduce_dtype = None if is_double and settings.reduce_dtype == "fp32" else DTYPES[settings.reduce_dtype]
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    blocks = [model.get_submodule(name) for name in _blocks(model, settings.blocks)]
    inside = {param for block in blocks for param in block.parameters()}
    groups = [*([*block.parameters()] for block in blocks), [one for one in model.parameters() if one not in inside]]
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
        "ignored_params": {*unsharded, *(one for group in groups for one in _unshardable(group))},
    }
    root = type(model).__name__
    for block in blocks:
        fully_shard(block, reshard_after_forward=settings.reshard_after_forward, **options)
    fully_shard(model, **options)
    if callable(getattr(model, "generate", None)):  # it runs layers without calling the model
        register_fsdp_forward_method(model, "generate")
    for kind in (root, "TransformerBlock"):  # nothing of ours changes in place what they return
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(FSDP{kind}\) returned a view")


def _unshardable(group: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters, of those gathered together, that torch cannot shard: it sums gradients of one dtype."""
    sizes = Counter[torch.dtype]()
    for param in group:
        sizes[param.dtype] += param.numel() * param.requires_grad
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    is_other = (param.requires_grad and param.dtype != usual and not is_sharded(param) for param in group)
    return [one for one, other in zip(group, is_other, strict=True) if other or not one.dim() or not one.numel()]


def _blocks(model: nn.Module, pattern: str | None) -> list[str]:
    """Return the modules that are gathered one at a time; what shares a parameter with others is gathered with them."""
    if pattern is None:
        return _apart(model, repeated_blocks(model))
    if found := modules_matching(model, pattern):
        if shared := [name for name in found if name not in _apart(model, found)]:
            raise ConfigError(
                f"parallel.blocks: {shared[0]} shares a parameter with another module, so both must be gathered "
                "together; leave it out of the pattern"
            )
        return found
    names = ", ".join(name for name, _ in model.named_children())
    raise ConfigError(f"parallel.blocks: no module matches '{pattern}' in {type(model).__name__}, which has {names}")


def _apart(model: nn.Module, names: list[str]) -> list[str]:
    """Return those of some modules that share no parameter with anything outside them."""
    blocks = {name: model.get_submodule(name) for name in names}
    inside = {one for block in blocks.values() for one in block.modules()}
    holders = Counter(param for block in blocks.values() for param in block.parameters())
    holders.update({param for one in model.modules() if one not in inside for param in one.parameters(recurse=False)})
    return [name for name, block in blocks.items() if all(holders[param] == 1 for param in block.parameters())]


class DeferredWeights:
    """The weights of a model that has no memory for them yet; made before it is divided, drawn afterwards."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        """Raise ConfigError if it is not known what initialises a weight."""
        self._model, self._recording = model, recording
        self._places: dict[int, list[tuple[str, Any]]] = {}
        """By the key of their memory, which several weights may share."""
        for name, param in weights_of(model).items():
            if param.is_meta:
                if not recording.is_complete(param):
                    raise ConfigError(
                        f"it is not known what initialises {name}, so it cannot be deferred; initialise it inside "
                        "deferred_weights(), or make the model plainly (parallel.meta_device: false)"
                    )
                view = param.shape, param.stride(), param.storage_offset()
                self._places.setdefault(key_of(param), []).append((name, view))

    @torch.no_grad()
    def draw(self, device: torch.device, world: World) -> None:
        """Give every process its part of the weights, on its device. All processes must call this together."""
        tied = tied_names(self._model)
        self._model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device))
        for first, others in tied.items():  # for each name torch has made a parameter
            for module, _, leaf in (name.rpartition(".") for name in others):
                setattr(self._model.get_submodule(module), leaf, self._model.get_parameter(first))
        state = self._recording.random_state.clone()
        run_collective(lambda alias: dist.broadcast(alias, src=0, group=world.host_group), state)
        weights = weights_of(self._model)
        for key, values in self._recording.draw(state):
            for name, view in self._places.get(key, ()):
                param = weights[name]
                local_of(param.detach()).copy_(part_of(values.as_strided(*view), param))


class Shards:
    """The parameters of a divided model, and their local shards for the optimizer."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """`world` are the processes with different samples."""
        self._model, self._world = model, world
        self._local: dict[int, nn.Parameter] = {}
        self._sharded: list[LocalParameter] = []
        self._whole: list[nn.Parameter] = []
        """Parameters that are not sharded: their gradients are averaged over the processes here."""
        self._probes: list[tuple[dict[str, Any], str, DTensor]] = []
        """Where modules hold their sharded parameters."""
        for module in model.modules():
            places: dict[str, Any] = module._parameters
            self._probes += [(places, name, one) for name, one in places.items() if is_sharded(one)]
        for param in model.parameters():
            if is_sharded(param):
                local = LocalParameter(param.to_local().detach(), requires_grad=param.requires_grad)
                local.sharded = param
                self._sharded.append(local)
                self._local[id(param)] = local
            else:
                self._local[id(param)] = param
                self._whole.append(param)

    def local(self, param: nn.Parameter) -> nn.Parameter:
        """Return the local shard of a parameter of the model."""
        return self._local[id(param)]

    def named(self, names: Mapping[int, str]) -> dict[int, str]:
        """Return names by the ids of parameters as names by the ids of their local shards."""
        return {id(self._local[key]): name for key, name in names.items() if key in self._local}

    def clear(self) -> None:
        """Drop the gradients of the model, and free weights that were gathered for something else than a step.

        After a forward pass without a backward pass some are still gathered: they would not follow the next update.
        """
        if any(held[name] is not param for held, name, param in self._probes):
            reshard(self._model)
        for local in self._sharded:
            local.sharded.grad = None
        for param in self._whole:
            param.grad = None

    def collect(self) -> None:
        """Give every local shard the gradient of its parameter; average those of parameters that are not sharded."""
        for local in self._sharded:
            param = local.sharded
            if local.data_ptr() != param._local_tensor.data_ptr():  # torch has padded it before the first step
                local.data = param._local_tensor
            grad = None if param.grad is None else _as_divided(param.grad, param)
            if grad is not None and grad.stride() != local.stride():  # which fused kernels do not check
                grad = torch.empty_like(local).copy_(grad)
            local.grad = grad
        self._average([param.grad for param in self._whole if param.grad is not None])

    def _average(self, grads: Sequence[Tensor]) -> None:
        if not grads or self._world.size == 1:
            return
        flat = torch.cat([grad.flatten() for grad in grads])
        self._world.sum(flat)
        flat /= self._world.size
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def norm(
        self, params: Iterable[Tensor], grads: Iterable[Tensor], norm_of: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """Return the norm of the gradients of these parameters over all processes; `norm_of` is that of some here."""
        by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for param, grad in zip(params, grads, strict=True):
            by_groups.setdefault(_groups(param), []).append(grad)
        total: Tensor | None = None
        for groups, grads in by_groups.items():
            square = norm_of(grads) ** 2
            for group in groups:
                run_collective(lambda alias, group=group: dist.all_reduce(alias, group=group), square)
            total = square if total is None else total + square
        assert total is not None
        return total.sqrt()


def _as_divided(grad: Any, param: DTensor) -> Tensor:
    """Return the local part of a gradient, which torch gives whole for an embedding that is divided by rows."""
    same = grad.placements == param.placements
    part: Tensor = (grad if same else grad.redistribute(placements=param.placements))._local_tensor
    return part


def follow_shards(optimizer: Any, names: Mapping[int, str], model: nn.Module, shards: Shards) -> None:
    """Give optimizers that were made before the model was divided the local shards of its parameters.

    `names` are those of the parameters before. Anything but optimizers is left as it is. Raises ConfigError if one has
    state already.
    """
    for one in optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,):
        if not isinstance(one, torch.optim.Optimizer):
            continue
        if one.state:
            raise ConfigError(
                f"{type(one).__name__} has state of undivided parameters already; pass a function of the parameters "
                "that makes it, or its name"
            )
        for group in one.param_groups:
            params = group["params"]
            group["params"] = [
                shards.local(model.get_parameter(names[id(param)])) if id(param) in names else param
                for param in params
            ]


def _groups(param: Tensor) -> tuple[Any, ...]:
    """Return the groups of processes over which the elements of a parameter are divided."""
    if not isinstance(param, LocalParameter):
        return ()
    mesh, placements = param.sharded.device_mesh, param.sharded.placements
    assert not any(isinstance(one, Partial) for one in placements)
    divided = (place for place, one in enumerate(placements) if not isinstance(one, Replicate))
    return tuple(mesh.get_group(place) for place in divided if mesh.size(place) > 1)
