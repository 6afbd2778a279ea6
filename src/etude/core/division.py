"""Dividing a batch into smaller ones of consecutive samples."""

from itertools import pairwise
from typing import Any

from torch import Tensor

from etude.core.batch import Batch, JointBatch, count_samples, without_samples
from etude.core.errors import DataError
from etude.core.forms import parts_of, with_parts

_SHARED = (str, bytes, bool, int, float, complex, type(None))
"""Values that belong to a whole batch, such as the name of its stream."""


def divide(batch: Batch, count: int) -> list[Batch]:
    """Return a batch as up to `count` batches of consecutive samples, whose sizes differ by at most one.

    Tensors are views, not copies. A batch with fewer samples gives fewer batches. Raises DataError for a batch that
    does not consist of samples.

    >>> import torch
    >>> [part["x"].tolist() for part in divide({"x": torch.arange(5), "stream": "a"}, 2)]
    [[0, 1, 2], [3, 4]]
    """
    if isinstance(batch, JointBatch):  # one list per place: the parts of all streams
        streams = [divide(part, count) for part in batch]
        longest = max(map(len, streams), default=0)
        return [JointBatch([parts[place] for parts in streams if place < len(parts)]) for place in range(longest)]
    samples = count_samples(batch)
    if samples is None:
        raise DataError(f"a batch of type {type(batch).__name__} cannot be divided: its samples cannot be counted")
    count = min(count, samples)
    if count <= 1:
        return [batch]
    small, larger = divmod(samples, count)
    ends = [place * small + min(place, larger) for place in range(count + 1)]
    return [_cut(batch, samples, slice(*span)) for span in pairwise(ends)]


def divide_exactly(batch: Batch, count: int) -> list[Batch]:
    """Return a batch as `count` batches; those beyond its samples are empty, and every one has all streams.

    >>> import torch
    >>> [part.tolist() for part in divide_exactly(torch.arange(2), 3)]
    [[0], [1], []]
    """
    if isinstance(batch, JointBatch):
        return [JointBatch(parts) for parts in zip(*(divide_exactly(part, count) for part in batch), strict=True)]
    parts = divide(batch, count)
    return parts + [without_samples(batch) for _ in range(count - len(parts))]


def _cut(value: Any, samples: int, span: slice) -> Any:
    """Return some samples of a value inside a batch of so many."""
    if isinstance(value, Tensor):
        if not value.dim():
            return value
        if value.shape[0] != samples:
            raise DataError(
                f"a batch of {samples} samples cannot be divided: it holds a tensor of shape {tuple(value.shape)}, "
                "whose first dimension is not that of the samples"
            )
        return value[span]
    if isinstance(value, list | tuple) and len(value) == samples and not _is_structure(value, samples):
        return value[span]
    if (parts := parts_of(value)) is not None:
        return with_parts(value, {key: _cut(one, samples, span) for key, one in parts.items()})
    if isinstance(value, _SHARED):
        return value
    raise DataError(f"a batch that holds a {type(value).__name__} cannot be divided into smaller ones")


def _is_structure(values: list[Any] | tuple[Any, ...], samples: int) -> bool:
    """Whether a list holds the inputs and labels of a batch, rather than one entry per sample."""
    return any(isinstance(one, Tensor) and one.dim() and one.shape[0] == samples for one in values)
