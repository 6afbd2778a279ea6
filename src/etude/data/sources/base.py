"""Sources that return whole batches: several samples by index at once, such as blocks of token files."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import Batch, in_pinned_memory, map_tensors, to_device
from etude.data.order.permutation import Indices, Order
from etude.data.order.sampler import BatchSampler

CHUNK_BYTES = 800_000
"""Maximum size of batches read together: they fit the processor's cache, and Python overhead is small."""
MAX_CHUNK = 16
DRAWN = 64
"""Batches whose indices are drawn together."""


@runtime_checkable
class BatchSource(Protocol):
    """Samples that are read in groups. The result of `gather` is a pure function of its arguments."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> Batch:
        """Return the samples at `indices` in this order, as new CPU tensors."""
        ...


@runtime_checkable
class DecodingSource(BatchSource, Protocol):
    """A source whose samples may need decoding, which is slow enough for worker processes."""

    @property
    def decodes(self) -> bool:
        """Whether they need decoding."""
        ...


@runtime_checkable
class UniformSource(BatchSource, Protocol):
    """A source whose samples all have the same shape: several batches can be gathered at once."""

    @property
    def sample_bytes(self) -> int:
        """Memory of one gathered sample."""
        ...

    def gather_many(self, indices: Indices, number: int, *, epoch: int, seed: int) -> Iterator[Batch]:
        """Return `number` equal batches of the samples at `indices`."""
        ...


@runtime_checkable
class MeasuredSource(BatchSource, Protocol):
    """A source that knows the lengths of its samples, so that they can be bucketed."""

    def lengths(self, indices: Indices) -> Indices:
        """Return the lengths of the samples at `indices`."""
        ...


@runtime_checkable
class OrderedSource(BatchSource, Protocol):
    """A source that defines which samples an epoch has, such as a mixture."""

    def order(self, *, shuffle: bool, seed: int) -> Order:
        """Return the order of its samples."""
        ...


@runtime_checkable
class ResizableSource(BatchSource, Protocol):
    """A source of token sequences whose length can be changed."""

    @property
    def longest(self) -> int | None:
        """Maximum tokens per sample; None if unlimited."""
        ...

    def with_length(self, length: int) -> "ResizableSource":
        """Return the same text in samples of at most `length` tokens."""
        ...


class GatheredBatches:
    """Batches of a source in the sampler's order, on a device if given."""

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
    """Return the batch in pinned memory or on a device. Views of one memory block are copied together and stay views.

    Ids and labels of a block overlap; copied separately they would be copied twice, and row by row.
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
