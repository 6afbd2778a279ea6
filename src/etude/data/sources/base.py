"""Sources that make whole batches: samples by index, several at once, such as blocks and documents of token files."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import Batch, in_pinned_memory, map_tensors, to_device
from etude.data.order.permutation import Indices, Order
from etude.data.order.sampler import BatchSampler

CHUNK_BYTES = 800_000
"""Batches read together are at most this large: they stay in the processor's cache, and Python's share is small."""
MAX_CHUNK = 16
DRAWN = 64
"""Batches whose indices are drawn together."""


@runtime_checkable
class BatchSource(Protocol):
    """Samples that are read many at once. What `gather` returns is a pure function of its arguments."""

    def __len__(self) -> int:
        """Samples."""
        ...

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> Batch:
        """Return the samples at `indices` in this order, as new tensors in CPU memory."""
        ...


@runtime_checkable
class DecodingSource(BatchSource, Protocol):
    """A source whose samples may have to be decoded, which takes long enough for worker processes."""

    @property
    def decodes(self) -> bool:
        """Whether they have to."""
        ...


@runtime_checkable
class UniformSource(BatchSource, Protocol):
    """A source whose samples all have the same shape: several batches can be gathered in one go."""

    @property
    def sample_bytes(self) -> int:
        """Memory that one gathered sample takes."""
        ...

    def gather_many(self, indices: Indices, number: int, *, epoch: int, seed: int) -> Iterator[Batch]:
        """Return `number` equal batches of the samples at `indices`."""
        ...


@runtime_checkable
class MeasuredSource(BatchSource, Protocol):
    """A source that knows how long its samples are, so that they can be bucketed."""

    def lengths(self, indices: Indices) -> Indices:
        """Return the lengths of the samples at `indices`."""
        ...


@runtime_checkable
class OrderedSource(BatchSource, Protocol):
    """A source that decides itself which samples an epoch has, such as a mixture."""

    def order(self, *, shuffle: bool, seed: int) -> Order:
        """Return the order of its samples."""
        ...


@runtime_checkable
class ResizableSource(BatchSource, Protocol):
    """A source of token sequences that can be cut to another length."""

    @property
    def longest(self) -> int | None:
        """Tokens of a sample at most; None if nothing limits them."""
        ...

    def with_length(self, length: int) -> "ResizableSource":
        """Return the same text in samples of `length` tokens, or of at most so many."""
        ...


class GatheredBatches:
    """Batches of a source in the sampler's order, on a device if one is given."""

    def __init__(self, source: BatchSource, seed: int, *, device: torch.device | None, pin_memory: bool) -> None:
        self.source, self.seed = source, seed
        self.device, self.pin_memory = device, pin_memory
        self._moves = pin_memory or device is not None

    def batches(self, sampler: BatchSampler, epoch: int, position: int) -> Iterator[Batch]:
        """Return the batches of `epoch` from `position` on."""
        source, seed = self.source, self.seed
        if isinstance(source, UniformSource) and not self._moves:
            batch_bytes = source.sample_bytes * -(-sampler.batch_size // sampler.world_size)
            count = max(1, min(MAX_CHUNK, CHUNK_BYTES // batch_bytes))
            for drawn, number in sampler.chunks(epoch, position, DRAWN):
                for chunk in np.split(drawn.reshape(number, -1), range(count, number, count)):
                    yield from source.gather_many(chunk.reshape(-1), len(chunk), epoch=epoch, seed=seed)
            return
        for drawn, number in sampler.chunks(epoch, position, DRAWN):
            for indices in drawn.reshape(number, -1):
                yield self.gather(indices, epoch=epoch)

    def gather(self, indices: Indices, *, epoch: int) -> Batch:
        """Return the samples at `indices`."""
        batch = self.source.gather(indices, epoch=epoch, seed=self.seed)
        return send(batch, self.device, pin_memory=self.pin_memory) if self._moves else batch


def send(batch: Batch, device: torch.device | None, *, pin_memory: bool) -> Batch:
    """Return the batch in pinned memory or on a device. Views of one piece of memory travel together and stay views.

    Ids and labels of a block overlap; sent one by one they would be copied twice, and row by row.
    """
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        whole = moved.get(storage.data_ptr())
        if whole is None or whole.dtype is not tensor.dtype:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            if pin_memory:
                whole = whole.pin_memory()
            if device is not None:
                whole = whole.to(device, non_blocking=pin_memory)
            moved[storage.data_ptr()] = whole
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def move_object(batch: Any) -> Any:
        batch = in_pinned_memory(batch) if pin_memory else batch
        return batch if device is None else to_device(batch, device)

    return map_tensors(batch, move, ("to", move_object))
