"""Data in memory: tensors, arrays or a mapping of them, gathered by one vectorised copy per batch."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import Batch, DataBatch
from etude.core.errors import DataError
from etude.data.order import BatchSampler, Indices

LABELS = "labels"


def is_in_memory(data: object) -> bool:
    """Whether `data` is a tensor, an array or a mapping, to be held and gathered as a whole."""
    return isinstance(data, (Tensor, np.ndarray, Mapping))


class TensorSource:
    """Equally long tensors that batches are gathered from.

    >>> source = TensorSource(torch.arange(6) * 10, torch.arange(6))
    >>> source.gather(np.array([4, 1]))
    DataBatch(data=tensor([40, 10]), labels=tensor([4, 1]))

    With `pin_memory` the gather writes straight into page-locked memory.
    """

    def __init__(self, data: Any, labels: Any = None, *, pin_memory: bool = False) -> None:
        self.is_mapping = isinstance(data, Mapping)
        if isinstance(data, Mapping):
            if labels is not None and LABELS in data:
                raise DataError("labels are given twice: in the mapping and as an argument of their own; give one")
            columns = {str(key): _as_tensor(value, str(key)) for key, value in data.items()}
        else:
            columns = {"data": _as_tensor(data, "data")}
        if labels is not None:
            columns[LABELS] = _as_tensor(labels, LABELS)
        self.columns = columns
        self.num_samples = _common_length(columns)
        self.device = next(iter(columns.values())).device
        self._take = _take_pinned if pin_memory and self.device.type == "cpu" else _take
        self._data = columns.get("data")
        self._labels = columns.get(LABELS)

    def gather(self, indices: Indices) -> Batch:
        """Return the samples at `indices`: a `DataBatch`, or a dict if the data is a mapping."""
        index = torch.from_numpy(indices)
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        take = self._take
        if self.is_mapping:
            return {key: take(column, index) for key, column in self.columns.items()}
        assert self._data is not None
        return DataBatch(take(self._data, index), None if self._labels is None else take(self._labels, index))

    def batches(self, sampler: BatchSampler, epoch: int, position: int) -> Iterator[Batch]:
        """Return the batches of `epoch` from `position` on."""
        while sampler.has_batch(position):
            yield self.gather(sampler.batch(epoch, position))
            position = sampler.next_position(position)


def _take(column: Tensor, index: Tensor) -> Tensor:
    return column.index_select(0, index)


def _take_pinned(column: Tensor, index: Tensor) -> Tensor:
    pinned = torch.empty((len(index), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
    return torch.index_select(column, 0, index, out=pinned)


def _as_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, np.ndarray):
        try:
            with warnings.catch_warnings():
                # A read-only array (a memory-mapped file) is fine: it is only ever read.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                value = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"{name}: an array of {value.dtype} cannot become a tensor; convert it first") from error
    if not isinstance(value, Tensor):
        raise DataError(f"{name} is a {type(value).__name__}; give a tensor or a NumPy array")
    if value.dim() == 0:
        raise DataError(f"{name} is a single number; its first dimension must run over the samples")
    return value.detach()


def _common_length(columns: Mapping[str, Tensor]) -> int:
    lengths = {key: column.shape[0] for key, column in columns.items()}
    devices = {str(column.device) for column in columns.values()}
    if not lengths:
        raise DataError("the data is empty: the mapping has no tensors")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise DataError(f"data of different lengths: {found}; every tensor must have one entry per sample")
    if len(devices) > 1:
        raise DataError(f"the data lies on several devices ({', '.join(sorted(devices))}); move it to one")
    return next(iter(lengths.values()))
