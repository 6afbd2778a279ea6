"""`SavedTensor`: a tensor of a checkpoint whose values, or some of them, are read when they are needed."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_map_only

from etude.checkpoint.contents import SHARDING
from etude.checkpoint.format import DTYPES
from etude.core.errors import CheckpointError
from etude.distributed.shards import Block, block_of, is_sharded, local_of, part_of

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of a tensor in a file."""

    file: Any
    name: str
    block: Block

    def read(self, block: Block) -> Tensor:
        """Return a block that lies inside this one, counted from the start of the tensor."""
        if block == self.block:
            return self.file.get_tensor(self.name)  # type: ignore[no-any-return]
        return self.file.get_slice(self.name)[block.inside(self.block).slices]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Memory:
    """Values in host memory, in place of a file."""

    values: Tensor

    def get_tensor(self, _name: str) -> Tensor:
        """Return all values."""
        return self.values

    get_slice = get_tensor


class SavedTensor(Tensor):
    """Shape and dtype of a saved tensor, and where its values are. Any operation on it reads all of them."""

    _pieces: list[_Piece]

    @staticmethod
    def __new__(cls, pieces: list[_Piece], shape: tuple[int, ...], dtype: torch.dtype) -> "SavedTensor":
        """Make one of pieces that cover it."""
        made: SavedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._pieces = pieces
        return made

    def full(self) -> Tensor:
        """Read all values into new memory on the CPU."""
        return self.read(Block.whole(tuple(self.shape)))

    def local(self, like: Tensor) -> Tensor:
        """Read the part that belongs to this rank in the layout of `like`; everything if that is a plain tensor."""
        return self.read(block_of(like)) if is_sharded(like) else self.full()

    def read(self, block: Block) -> Tensor:
        """Read one block into new memory on the CPU: a mapped file could start at any address, and change."""
        values, num_read = torch.empty(block.shape, dtype=self.dtype), 0
        for piece in self._pieces:
            if (common := piece.block.common(block)) is not None:
                values[common.inside(block).slices] = piece.read(common)
                num_read += common.numel
        assert num_read == block.numel, "other ranks hold these values"
        return values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(SavedTensor, SavedTensor.full, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SavedTensor({tuple(self.shape)}, {self.dtype})"


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with its values in memory."""
    return tensor.full() if isinstance(tensor, SavedTensor) else tensor


def whole_tree(tree: Any) -> Any:
    """Return a tree of dicts, lists and tuples with all values in memory."""
    if isinstance(tree, dict):
        return {key: whole_tree(one) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(whole_tree, tree))
    return whole(tree) if isinstance(tree, Tensor) else tree


def has_tensors(tree: Any) -> bool:
    """Whether a tree of dicts, lists and tuples holds tensors."""
    if isinstance(tree, dict):
        return any(map(has_tensors, tree.values()))
    return any(map(has_tensors, tree)) if isinstance(tree, (list, tuple)) else isinstance(tree, Tensor)


def own_part(saved: Tensor, like: Tensor) -> Tensor:
    """Return the part of a saved tensor, in memory or not, that belongs to this rank in the layout of `like`.

    A DTensor already has that layout.
    """
    if is_sharded(saved):
        assert is_sharded(like), "saved divided among ranks, loaded whole"
        assert block_of(saved) == block_of(like), "saved and loaded in different layouts"
        return local_of(saved)
    return saved.local(like) if isinstance(saved, SavedTensor) else part_of(saved, like)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy in host memory: of a tensor that is divided among ranks, one of this rank's part."""
    values = local_of(tensor).detach().cpu().clone()
    if not is_sharded(tensor):
        return values
    return SavedTensor([_Piece(_Memory(values), "", block_of(tensor))], tuple(tensor.shape), tensor.dtype)


@torch.no_grad()
def fill(own: Tensor, saved: Tensor) -> None:
    """Copy a saved tensor, in memory or not, into one of the run; of one that is divided among ranks, this rank's part.

    Both have the same shape over all ranks.
    """
    local_of(own).copy_(own_part(saved, own))


def saved_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of some safetensors files by name: blocks of one name, in any of them, are one tensor.

    Raises CheckpointError if the blocks of a tensor do not cover it.
    """
    pieces: dict[str, list[_Piece]] = {}
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for path in paths:
        try:
            _collect(path, pieces, kinds)
        except Exception as error:  # the header may hold anything
            raise CheckpointError(f"cannot read {path}: {error!s:.200}; use another checkpoint") from error
    for name, found in pieces.items():
        starts = {piece.block.offset for piece in found}
        if sum(piece.block.numel for piece in found) != math.prod(kinds[name][0]) or len(starts) != len(found):
            raise CheckpointError(f"the blocks of {name} in {len(found)} files do not make up {kinds[name][0]}")
    return {name: SavedTensor(found, *kinds[name]) for name, found in pieces.items()}


def _collect(path: Path, pieces: dict[str, list[_Piece]], kinds: dict[str, Any]) -> None:
    file: Any = safe_open(path, "pt")
    info: Mapping[str, Any] = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
    for name in file.keys():  # noqa: SIM118 - not a dict
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        place = info.get(name, {"saved_offsets": (0,) * len(shape), "shape": shape})
        block = Block(tuple(map(int, place["saved_offsets"])), shape)
        kind = tuple(map(int, place["shape"])), _DTYPES[part.get_dtype()]
        if kinds.setdefault(name, kind) != kind:
            raise ValueError(f"{name} is {kind} here and {kinds[name]} in another file")
        if not len(block.offset) == len(shape) == len(kind[0]) or not _fits(block, kind[0]):
            raise ValueError(f"{name} is {shape} at {block.offset}, which is not in {kind[0]}")
        pieces.setdefault(name, []).append(_Piece(file, name, block))


def _fits(block: Block, shape: tuple[int, ...]) -> bool:
    return all(0 <= at <= at + size <= whole for at, size, whole in zip(*block, shape, strict=True))
