"""Samples of arrays in memory or mapped files: gathered by batch, normalised, augmented per sample."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.core.batch import Batch, DataBatch
from etude.core.errors import DataError
from etude.data.catalog.holdout import Rows, mix_keys

Array = npt.NDArray[Any]
Augment = Callable[[Array, "npt.NDArray[np.uint64]"], Array]
"""A function of samples and one random number per sample."""
SAMPLE_BYTES = 2**30
"""Larger arrays are represented by evenly spaced samples up to this size, for the mean and the fingerprint."""
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Scaling:
    """Inputs become (x - mean) / std in float32: per feature of (N, F), per channel of (N, C, H, W), or overall."""

    mean: Array
    std: Array

    @classmethod
    def of(cls, inputs: Array, rows: Rows) -> "Scaling":
        """Compute the statistics from some rows. Raises DataError for non-finite values."""
        axes = (0, 2, 3) if inputs.ndim == 4 else (0,) if inputs.ndim == 2 else tuple(range(inputs.ndim))
        total, square, count = 0.0, 0.0, 0
        shift: Any = None
        for place, block in _blocks(inputs, spaced(inputs, rows)):
            values = block.astype(np.float64)
            if not np.isfinite(values).all():
                bad = int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0])
                raise DataError(f"sample {place[bad]} of the inputs has non-finite values; fix them")
            shift = values.mean(axes, keepdims=True) if shift is None else shift
            values -= shift  # so that squares of large numbers keep their precision
            total, square = total + values.sum(axes), square + np.square(values).sum(axes)
            count += values.size // np.asarray(total).size
        mean = total / count
        variance = np.maximum(square / count - np.square(mean), 0.0)
        mean = mean + shift.reshape(np.shape(mean))
        std = np.sqrt(variance)
        std = np.where(std > 1e-12 * np.maximum(1.0, np.abs(mean)), std, 1.0)
        return cls(np.asarray(mean), np.asarray(std))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], unit: float = 1.0) -> "Scaling":
        """Return the scaling of `facts`, whose statistics are in this unit."""
        return cls(unit * np.asarray(facts["mean"], np.float64), unit * np.asarray(facts["std"], np.float64))

    def facts(self) -> dict[str, Any]:
        """Return the statistics as plain data."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist()}

    def __call__(self, values: Array) -> npt.NDArray[np.float32]:
        """Return the values in float32."""
        dtype: Any = np.float32 if values.dtype in (np.float32, np.float16, np.uint8) else np.float64
        shape = (-1, 1, 1) if values.ndim == 4 and self.mean.ndim else self.mean.shape
        scaled: Array = values.astype(dtype) - self.mean.astype(dtype).reshape(shape)
        scaled *= (1.0 / self.std).astype(dtype).reshape(shape)
        result: npt.NDArray[np.float32] = scaled.astype(np.float32, copy=False)
        return result


class ArrayRows:
    """Some rows of an array of inputs, with labels of the same length or none: a source of whole batches."""

    def __init__(
        self,
        inputs: Array,
        labels: Array | None,
        rows: Rows | None = None,
        *,
        scaling: Scaling | None = None,
        augment: Augment | None = None,
    ) -> None:
        self.inputs, self.labels, self.rows = inputs, labels, rows
        self.scaling, self.augment = scaling, augment

    def __len__(self) -> int:
        return len(self.inputs) if self.rows is None else len(self.rows)

    @property
    def decodes(self) -> bool:
        """Whether inputs are decoded on access instead of being an array."""
        return not isinstance(self.inputs, np.ndarray)

    def gather(self, indices: Rows, *, epoch: int, seed: int) -> Batch:
        """Return the samples at `indices`; augmentation depends only on (seed, epoch, index)."""
        rows = indices if self.rows is None else self.rows[indices]
        values = self.inputs[rows]
        if self.augment is not None:
            values = self.augment(values, sample_keys(indices, epoch, seed))
        values = as_inputs(values) if self.scaling is None else self.scaling(values)
        labels = None if self.labels is None else torch.from_numpy(self.labels[rows])
        return DataBatch(torch.from_numpy(values), labels)


def sample_keys(indices: Rows, epoch: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return a random number for every sample of an epoch."""
    key = mix_keys(np.array([seed & (2**64 - 1)], dtype=np.uint64))
    key = mix_keys(key ^ np.uint64(epoch))
    return mix_keys(key ^ indices.astype(np.uint64))


def as_inputs(values: Array) -> Array:
    """Return model inputs: numbers as float32, bytes as 0 … 1, other integers as int64.

    >>> as_inputs(np.array([0, 255], np.uint8)), as_inputs(np.array([7], np.int32)).dtype
    (array([0., 1.], dtype=float32), dtype('int64'))
    """
    if values.dtype == np.uint8:
        return values.astype(np.float32) / np.float32(255)
    return values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)


def spaced(array: Array, rows: Rows) -> Rows:
    """Return evenly spaced rows, or all of them if they are not too large together."""
    most = max(1, SAMPLE_BYTES // max(1, array[:1].nbytes))
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.intp)]


def _blocks(array: Array, rows: Rows) -> Iterator[tuple[Rows, Array]]:
    size = max(1, _BLOCK_BYTES // max(1, array[:1].nbytes))
    for begin in range(0, len(rows), size):
        place = rows[begin : begin + size]
        yield place, array[place]


def digest_blocks(arrays: Mapping[str, Array]) -> Iterator[Any]:
    """Yield the input of a fingerprint of arrays: shape, dtype, and all or some samples."""
    for name, array in arrays.items():
        yield f"{name} {array.dtype.str} {array.shape}"
        for _, block in _blocks(array, spaced(array, np.arange(len(array)))):
            yield block
