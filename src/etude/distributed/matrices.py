"""Whole matrices of a model that processes divide: each process gets a share of them, and returns parts to all."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from etude.distributed.shards import is_sharded, model_param


class Matrices:
    """Exchanges stacks of parameters of one layout (`layout_of`) between the processes that divide them.

    Where n processes have a part of each of k matrices, every one gets k/n whole ones, so that what is computed of
    whole matrices is computed once; replicas compute the same. A stack of parameters that are not divided stays as
    it is.
    """

    def __init__(self, like: Tensor, number: int) -> None:
        """`like` is one of `number` parameters. All processes must exchange them together, in the same order."""
        param = model_param(like)
        self._mesh: Any = None
        self._as_parts: list[Any] = []
        self._as_shares: list[Any] = []
        self._as_copies: list[Any] = []
        self._shape = number, param.size(0), math.prod(param.shape[1:])
        if not is_sharded(param):
            return
        from torch.distributed.tensor import Replicate, Shard

        placements: Sequence[Any] = param.placements
        assert all(one.is_replicate() or one.dim == 0 or param.dim() == 2 for one in placements), placements
        self._mesh = param.device_mesh
        self._as_parts = [*map(_one_later, placements)]
        self._as_shares = [one if one.is_replicate() else Shard(0) for one in placements]
        self._as_copies = [Replicate()] * len(placements)

    def shares(self, parts: Tensor) -> Tensor:
        """Return the whole matrices of this process, given its parts of all of them: (number, rows, columns)."""
        return self._exchanged(parts, self._shape, self._as_parts, self._as_shares)

    def parts(self, shares: Tensor) -> Tensor:
        """Return the parts of this process of all matrices, given its whole ones."""
        return self._exchanged(shares, self._shape, self._as_shares, self._as_parts)

    def share_of(self, values: Tensor) -> Tensor:
        """Return the rows for the matrices of this process, of a tensor that all processes have."""
        return self._exchanged(values, values.shape, self._as_copies, self._as_shares)

    def copies(self, shares: Tensor) -> Tensor:
        """Return the rows of all processes, given those for the matrices of this one."""
        shape = self._shape[0], *shares.shape[1:]
        return self._exchanged(shares, shape, self._as_shares, self._as_copies)

    def _exchanged(self, values: Tensor, shape: Sequence[int], before: list[Any], after: list[Any]) -> Tensor:
        if self._mesh is None:
            return values
        from torch.distributed.tensor import DTensor

        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride()
        found = DTensor.from_local(values, self._mesh, before, run_check=False, shape=size, stride=stride)
        if after is self._as_copies or self._mesh.device_type == "cpu":  # gloo has no all-to-all
            # One dimension at a time, the last division first: torch warns if several are gathered at once.
            last_first = range(len(before)) if any(map(_is_interleaved, before)) else range(len(before))[::-1]
            copied = list(before)
            for place in last_first:
                copied[place] = self._as_copies[place]
                found = found.redistribute(placements=copied)
        local: Tensor = found.redistribute(placements=after).to_local()
        return local


def _one_later(placement: Any) -> Any:
    """Return a placement for tensors with one more dimension in front."""
    from torch.distributed.tensor import Shard

    if placement.is_replicate():
        return placement
    later = placement.dim + 1
    return type(placement)(later, split_factor=placement.split_factor) if _is_interleaved(placement) else Shard(later)


def _is_interleaved(placement: Any) -> bool:
    """Whether a placement is that of FSDP over tensor parallelism on the same dimension."""
    return type(placement).__name__ == "_StridedShard"


def layout_of(param: Tensor) -> Hashable:
    """Return the shape of a whole parameter, and how processes divide it."""
    whole = model_param(param)
    return (whole.shape, whole.device_mesh, whole.placements) if is_sharded(whole) else whole.shape


def largest_part(param: Tensor) -> int:
    """Return the number of elements of a parameter that a process has at most: the same number on all of them."""
    whole = model_param(param)
    if not is_sharded(whole):
        return whole.numel()
    sizes = zip(whole.device_mesh.shape, whole.placements, strict=True)
    return -(-whole.numel() // math.prod(size for size, one in sizes if not one.is_replicate()))
