"""Data in memory: tensors, arrays or a mapping of them, gathered by one vectorised copy per batch.

Batches for a CUDA device are copied in groups: at 0.2 ms per step there is no time for a separate gather, copy and
normalisation of each.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.core.batch import Batch, DataBatch, hand_out_parts
from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.order.sampler import BatchSampler
from etude.data.sources.arrays import as_tensor, is_array

LABELS = "labels"
CHUNK_BYTES = 4 * 2**20
"""Maximum size of batches that are copied to a device together."""
MAX_CHUNK = 64
ALIGNED = 256
"""Alignment of a batch's memory in bytes: libraries choose their kernels by it."""


def is_in_memory(data: object) -> bool:
    """Whether `data` is a tensor, an array, a table or a mapping, to be held in memory."""
    return isinstance(data, Mapping) or is_array(data)


class TensorSource:
    """Equally long tensors from which batches are gathered.

    >>> source = TensorSource(torch.arange(6) * 10, torch.arange(6))
    >>> source.gather(np.array([4, 1]))
    DataBatch(data=tensor([40, 10]), labels=tensor([4, 1]))

    With `pin_memory` the gather writes directly into pinned memory. With a CUDA `device` batches are delivered there,
    after applying `transform`, an elementwise function of their data.
    """

    def __init__(
        self,
        data: Any,
        labels: Any = None,
        *,
        pin_memory: bool = False,
        device: torch.device | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.is_mapping = isinstance(data, Mapping)
        if isinstance(data, Mapping):
            if labels is not None and LABELS in data:
                raise DataError("labels are given twice: in the mapping and as an argument; keep one")
            columns = {str(key): as_tensor(value, str(key)) for key, value in data.items()}
        else:
            columns = {"data": as_tensor(data, "data")}
        if labels is not None:
            columns[LABELS] = as_tensor(labels, LABELS)
        self.columns = columns
        self.num_samples = _common_length(columns)
        self._held = next(iter(columns.values())).device
        self.device = self._held if device is None else device
        """Where batches are delivered."""
        self.chunk_bytes = CHUNK_BYTES if self.device.type == "cuda" else 0
        """Maximum size of batches that are gathered together."""
        self._sample_bytes = sum(column[:1].numel() * column.element_size() for column in columns.values())
        self.transform = transform
        self._take = _take_pinned if pin_memory and self._held.type == "cpu" else _take

    def gather(self, indices: Indices, *, epoch: int = 0) -> Batch:  # noqa: ARG002
        """Return the samples at `indices`: a `DataBatch`, or a dict if the data is a mapping."""
        return self._batch(self._gather(indices))

    def batches(self, sampler: BatchSampler, epoch: int, position: int) -> Iterator[Batch]:
        """Return the batches of `epoch` from `position` on."""
        count = min(MAX_CHUNK, self.chunk_bytes // max(1, self._sample_bytes * sampler.batch_size))
        for drawn, number in sampler.chunks(epoch, position, max(1, count)):
            columns = self._gather(drawn)
            if number == 1:
                yield self._batch(columns)
                continue
            parts = [_split(column, len(drawn) // number) for column in columns.values()]
            for tensors in zip(*parts, strict=True):
                yield self._batch(dict(zip(columns, tensors, strict=True)))

    def _gather(self, indices: Indices) -> dict[str, Tensor]:
        index = torch.from_numpy(indices)
        if self._held.type == "cuda":
            index = index.pin_memory().to(self._held, non_blocking=True)
        found = {key: self._take(column, index) for key, column in self.columns.items()}
        if self.device != self._held:
            found = {key: column.to(self.device, non_blocking=column.is_pinned()) for key, column in found.items()}
        if self.transform is not None:
            found["data"] = self.transform(found["data"])
        return found

    def _batch(self, columns: dict[str, Tensor]) -> Batch:
        return columns if self.is_mapping else DataBatch(columns["data"], columns.get(LABELS))


def _take(column: Tensor, index: Tensor) -> Tensor:
    return column.index_select(0, index)


def _take_pinned(column: Tensor, index: Tensor) -> Tensor:
    pinned = torch.empty((len(index), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
    if not column.is_contiguous() or not pinned.numel():
        return torch.index_select(column, 0, index, out=pinned)
    # In this thread: waking torch's other threads for a few rows takes longer than copying them.
    np.take(_rows(column), index.numpy(), axis=0, out=_rows(pinned), mode="clip")
    return pinned


def _rows(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous tensor, one row of bytes per sample."""
    rows: npt.NDArray[np.uint8] = tensor.view(len(tensor), -1).view(torch.uint8).numpy()
    return rows


def _split(column: Tensor, size: int) -> list[Tensor]:
    """Return slices of `size` samples, each aligned like a newly allocated tensor."""
    parts = [hand_out_parts(column)[start : start + size] for start in range(0, len(column), size)]
    is_aligned = size * column.stride(0) * column.element_size() % ALIGNED == 0
    return parts if is_aligned else [part.clone() for part in parts]


def _common_length(columns: Mapping[str, Tensor]) -> int:
    lengths = {key: column.shape[0] for key, column in columns.items()}
    devices = {str(column.device) for column in columns.values()}
    if not lengths:
        raise DataError("the data is empty: the mapping has no tensors")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise DataError(
            f"data of different lengths: {found}; every tensor must have one entry per sample. Where that is not so, "
            "as with labels of masked positions only, pass a Dataset and a collate_fn, or batches"
        )
    if len(devices) > 1:
        raise DataError(f"the data is on several devices ({', '.join(sorted(devices))}); move it to one")
    return next(iter(lengths.values()))
