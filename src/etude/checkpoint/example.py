"""An example batch of a run, kept in its folder: what a program of its model is traced with and compared on."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from etude.checkpoint.format import DTYPES, pack, read_tensors, safetensors_pieces, unpack
from etude.core.batch import Batch, JointBatch, is_empty, map_tensors, num_samples
from etude.core.errors import CheckpointError
from etude.core.files import replacing
from etude.core.forms import kind_of, parts_of
from etude.core.run_layout import EXAMPLE

MOST_BYTES = 1_000_000
"""Larger examples are kept as shapes and dtypes only."""
_LARGE = "etude.large"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def save_example(batch: Batch, folder: Path) -> None:
    """Write two samples of a batch, which has some, into a run folder, as safetensors. Waits for the device.

    Raises CheckpointError for a batch that holds more than tensors, containers and plain values.
    """
    if isinstance(batch, JointBatch):
        batch = next(one for one in batch if not is_empty(one))
    size = num_samples(batch)
    rows = [0, min(1, size - 1)]

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[rows] if value.dim() and len(value) == size else value
        if isinstance(value, (list, tuple)) and len(value) == size:
            return [_plain(value[row]) for row in rows]
        return _plain(value)

    parts = parts_of(batch)
    if parts is None:
        tree = pick(batch)
    else:
        picked = {key: pick(value) for key, value in parts.items()}
        tree = tuple(picked.values()) if kind_of(batch) == "tuple" else picked
    tensors, structure = pack(_small(tree), "the example batch")
    with replacing(folder / EXAMPLE) as file:
        for piece in safetensors_pieces(tensors, {"structure": json.dumps(structure)}):
            file.write(piece)


def load_example(folder: Path) -> tuple[Batch, bool]:
    """Return the example batch of a run folder, and whether all its values are those of the run, not made up."""
    path = folder / EXAMPLE
    tensors = read_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            structure = json.loads(file.metadata()["structure"])
    except Exception as error:  # the file may hold anything
        raise CheckpointError(f"cannot read {path}: {error!s:.200}; remove it") from error
    made: list[Tensor] = []
    return _filled(unpack(tensors, structure), made), not made


def _plain(value: Any) -> Any:
    """Return containers of a batch as dicts, lists and tuples."""
    parts = None if isinstance(value, Tensor) else parts_of(value)
    if parts is None:
        return value
    found = {key: _plain(one) for key, one in parts.items()}
    return (list if isinstance(value, list) else tuple)(found.values()) if kind_of(value) == "tuple" else found


def _small(tree: Any) -> Any:
    """Return a tree with shapes and dtypes instead of tensors, the largest first, until the rest is small."""
    tensors = sorted(pack(tree, "the example batch")[0].values(), key=lambda one: one.nbytes)
    sums = torch.tensor([one.nbytes for one in tensors]).cumsum(0)
    kept = [one.nbytes for one, total in zip(tensors, sums, strict=True) if total <= MOST_BYTES]
    most = max(kept, default=-1)

    def described(tensor: Tensor) -> Any:
        large = {_LARGE: list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        return tensor if tensor.nbytes <= most else large

    return map_tensors(tree, described)


def _filled(tree: Any, made: list[Tensor]) -> Any:
    """Return a tree with made-up tensors where only shapes were kept: numbers of a normal distribution, or zeros."""
    if isinstance(tree, dict) and _LARGE in tree:
        shape, dtype = tree[_LARGE], _DTYPES.get(str(tree.get("dtype")))
        if dtype is None or not all(type(one) is int and one > 0 for one in shape) or math.prod(shape) > 2**28:
            raise CheckpointError(f"{EXAMPLE} describes an impossible tensor: {tree!r:.100}; remove it")
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.zeros(shape)
        made.append(values.to(dtype))
        return made[-1]
    if isinstance(tree, dict):
        return {key: _filled(one, made) for key, one in tree.items()}
    return type(tree)(_filled(one, made) for one in tree) if isinstance(tree, (list, tuple)) else tree
