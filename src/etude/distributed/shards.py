"""Tensors that are divided among ranks (DTensor): which block of a tensor a rank holds, and which rank writes it.

A parameter that an optimizer updates may be a plain alias of a model parameter's local shard: it then has the DTensor
as its attribute `sharded`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from torch import Tensor

from etude.core.errors import CheckpointError
from etude.core.model import is_divided

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Block(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Block":
        """Return the block that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the block in its tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def common(self, other: "Block") -> "Block | None":
        """Return the part that two blocks of a tensor share; None if they share nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Block(starts, shape) if all(size > 0 for size in shape) else None

    def inside(self, outer: "Block") -> "Block":
        """Return the same block, counted from the start of another one that holds it."""
        return Block(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


def is_sharded(tensor: Any) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor."""
    return is_divided(tensor)


def has_shards(tree: Any) -> bool:
    """Whether a tree of dicts, lists and tuples holds a DTensor."""
    if isinstance(tree, dict):
        return any(map(has_shards, tree.values()))
    return any(map(has_shards, tree)) if isinstance(tree, (list, tuple)) else is_sharded(tree)


def local_of(tensor: Tensor) -> Tensor:
    """Return the values that this rank holds, without a copy: of a plain tensor, the tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def block_of(tensor: "DTensor") -> Block:
    """Return the block of a DTensor that this rank holds.

    Raises CheckpointError if its values are not yet summed over ranks, or are not one block.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements, mesh = tensor.placements, tensor.device_mesh
    for place, placement in enumerate(placements):
        if placement.is_partial():
            raise CheckpointError(f"a tensor {tuple(tensor.shape)} is not yet summed over ranks ({placement})")
        # FSDP over tensor parallelism on the same dimension: the later mesh dimension divides the tensor first.
        factor = getattr(placement, "split_factor", 1)
        later = (mesh.size(i) for i in range(place + 1, mesh.ndim) if _same_dim(placements[i], placement))
        if factor > 1 and factor != math.prod(later):
            raise CheckpointError(f"a tensor {tuple(tensor.shape)} is divided as {placements}, not into blocks")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Block(tuple(offset), tuple(shape))


def is_owner(tensor: "DTensor") -> bool:
    """Whether this rank writes its block of a DTensor: of ranks with the same block only one does, the first.

    A mesh may be a part of all ranks, as that of FSDP beside tensor parallelism: then other parts hold copies.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "a rank outside the mesh has no block"
    if not (mesh.mesh == 0).any():
        return False
    is_first = all(at == 0 for at, one in zip(place, tensor.placements, strict=True) if one.is_replicate())
    return is_first and (local_of(tensor).numel() > 0 or not any(place))


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that belongs to this rank in the layout of `like`; all if that is plain."""
    return tensor[block_of(like).slices] if is_sharded(like) else tensor


def model_param(param: Tensor) -> Tensor:
    """Return the model's parameter behind an optimizer's: the DTensor that it is a shard of, or itself."""
    found: Tensor = getattr(param, "sharded", param)
    return found


def sharded_like(param: Tensor, tensor: Tensor) -> Tensor:
    """Return a DTensor whose local shard is `tensor`, such as a state of an optimizer, in the layout of a parameter.

    The parameter is a DTensor or an alias of its shard. Without either, or if `tensor` does not have the shape of the
    shard, `tensor` itself is returned.
    """
    like = model_param(param)
    if not is_sharded(like) or tensor.shape != local_of(like).shape:
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _same_dim(one: Any, other: Any) -> bool:
    return bool(one.is_shard() and one.dim == other.dim)
