"""One data set as batches: tensors, a source of batches, a token file or a map-style dataset, on a device."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from etude.core.arguments import as_device
from etude.core.batch import Batch, DataBatch, in_pinned_memory, tensors_in, to_device, without_samples
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order.mixed import BucketOrder
from etude.data.order.permutation import Indices, Order, SequentialOrder, ShuffledOrder
from etude.data.order.sampler import BatchSampler
from etude.data.order.streams import EndlessOrder
from etude.data.sources.base import BatchSource, DecodingSource, GatheredBatches, MeasuredSource, OrderedSource
from etude.data.sources.memory import TensorSource, is_in_memory
from etude.data.sources.workers import (
    Collate,
    DatasetSource,
    SeededSamples,
    SourceSamples,
    dataset_length,
)
from etude.data.text.documents import TokenDocuments
from etude.data.tokens.opening import open_tokens

logger = logging.getLogger("etude")

Transform = Callable[..., Any]


class Place(NamedTuple):
    """Where batches are delivered."""

    device: torch.device | None = None
    """None leaves them where they are created."""
    pin_memory: bool = False

    @classmethod
    def of(cls, device: torch.device | str | None, pin_memory: bool | None) -> "Place":
        """Return the requested location; pinned memory is the default for a CUDA device."""
        found = None if device is None else as_device(device)
        pin = found is not None and found.type == "cuda" if pin_memory is None else pin_memory
        return cls(found, pin and torch.cuda.is_available())


class Samples:
    """A data set whose batches are read by index or, faster, a whole epoch in a sampler's order.

    Raises DataError for an unknown kind of data, and for options that do not apply to it.
    """

    def __init__(
        self,
        data: Any,
        labels: Any = None,
        *,
        seed: int,
        place: Place,
        transform: Transform | None = None,
        collate_fn: Collate | None = None,
        bucket_batches: int = 0,
        workers: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(data, (str, Path)):
            data = TokenDocuments(open_tokens(data))
        self.data, self.seed, self.place, self.bucket_batches = data, seed, place, bucket_batches
        _check_options(data, labels, collate_fn, bucket_batches)
        device = place.device
        cuda = device if device is not None and device.type == "cuda" else None
        # A batch for another device is pinned before its copy, one for the CPU after the transform.
        self._pin_last = place.pin_memory and device is None and transform is not None
        pin = place.pin_memory and not self._pin_last
        self.source: TensorSource | GatheredBatches | DatasetSource
        if is_in_memory(data):
            # For a CUDA device the source does everything that can be done to several batches at once.
            is_elementwise = getattr(transform, "elementwise", False)
            at_once = transform if cuda and is_elementwise and not isinstance(data, Mapping) else None
            transform = None if at_once is not None else transform
            self.source = TensorSource(data, labels, pin_memory=pin, device=cuda, transform=at_once)
            self.size, there = self.source.num_samples, self.source.device
        elif isinstance(data, BatchSource) and not (workers and workers.get("num_workers") and _decodes(data)):
            self.source = GatheredBatches(data, seed, device=cuda, pin_memory=pin)
            self.size, there = len(data), torch.device("cpu") if cuda is None else cuda
        else:
            self.size, there = dataset_length(data), None
            in_workers = isinstance(data, BatchSource)
            samples = SourceSamples(data, seed) if in_workers else SeededSamples(data, collate_fn, seed)
            self.source = DatasetSource(samples, pin_memory=pin, **workers or {})
        self._target = None if device == there else device
        self._transform = None if transform is None else BatchTransform(transform)
        self._is_finished = self._target is None and transform is None and not self._pin_last
        """Whether batches of the source already have the requested location and form."""

    @property
    def threaded(self) -> bool:
        """Whether another thread may read it: fetching samples of a dataset seeds process-wide generators."""
        return not isinstance(self.source, DatasetSource)

    @property
    def can_use_workers(self) -> bool:
        """Whether worker processes can make its batches."""
        return not self.threaded or _decodes(self.data)

    @property
    def prefetch(self) -> int:
        """Default number of prefetched batches: for batches copied to CUDA, and for decoded ones.

        On the CPU passing a batch between threads takes longer than making one from tensors or token files.
        """
        to_cuda = self.place.device is not None and self.place.device.type == "cuda"
        is_slow = to_cuda or (self.threaded and _decodes(self.data))
        return 2 if is_slow and not isinstance(self.source, TensorSource) else 0

    def order(self, *, shuffle: bool) -> Order:
        """Return the order of the samples in each epoch."""
        if isinstance(self.data, OrderedSource):
            return self.data.order(shuffle=shuffle, seed=self.seed)
        return ShuffledOrder(self.size, self.seed) if shuffle else SequentialOrder(self.size)

    def bucketed(self, order: Order, batch_size: int, *, endless: bool = False) -> Order:
        """Return an order that groups samples of similar length, if configured; `endless`: without end."""
        pool = self.bucket_batches
        if endless:
            # A pool that spans most of one pass and of the next has samples twice, adjacent when sorted.
            pool = min(pool, order.size // (2 * batch_size))
            pool = pool if pool > 1 else 0
            order = EndlessOrder(order)
        if not pool:
            return order
        return BucketOrder(order, self.data.lengths, batch_size=batch_size, pool_batches=pool, seed=self.seed)

    def batches(self, sampler: BatchSampler, epoch: int, position: int) -> Iterator[Batch]:
        """Return the batches of `epoch` from `position` on."""
        batches = self.source.batches(sampler, epoch, position)
        return batches if self._is_finished else self._finished(batches, sampler, epoch, position)

    def _finished(
        self, batches: Iterator[Batch], sampler: BatchSampler, epoch: int, position: int
    ) -> Iterator[Batch]:
        finish, next_position, rank = self._finish, sampler.next_position, sampler.rank
        for batch in batches:
            yield finish(batch, epoch, position, rank)
            position = next_position(position)

    def read(self, indices: Indices, *, epoch: int, position: int, rank: int) -> Batch:
        """Return the samples at `indices`, possibly none: rank `rank`'s share of a batch at `position`."""
        if len(indices):
            batch = self.source.gather(indices, epoch=epoch)
        else:
            batch = without_samples(self.source.gather(np.zeros(1, np.int64), epoch=epoch))
        return batch if self._is_finished else self._finish(batch, epoch, position, rank)

    def _finish(self, batch: Batch, epoch: int, position: int, rank: int) -> Batch:
        """Return a batch in the requested location and form."""
        if self._target is not None:
            batch = to_device(batch, self._target)
        if self._transform is not None:
            batch = self._transform(batch, self.seed, epoch, position, rank)
        return in_pinned_memory(batch) if self._pin_last else batch


class SampledBatches:
    """The batches of one data set, in the order of a sampler."""

    def __init__(self, samples: Samples, sampler: BatchSampler) -> None:
        self.samples, self.sampler = samples, sampler
        self.rank, self.world_size = sampler.rank, sampler.world_size
        self.epoch_samples, self.num_batches = sampler.epoch_samples, sampler.num_batches
        self.threaded, self.has_batch = samples.threaded, sampler.has_batch

    def items(self, epoch: int, position: int) -> tuple[Iterator[tuple[int, Batch]], Iterator[Batch]]:
        """Return the batches from `position` on, each with the position after it, and an object to close."""
        batches = self.samples.batches(self.sampler, epoch, position)
        return zip(self.sampler.positions(position), batches, strict=False), batches

    def drawn(self, epoch: int, position: int) -> dict[str, Indices]:
        """Return the indices of this rank's samples in the batch at `position`, as if of a stream without a name."""
        return {"": self.sampler.batch(epoch, position)}

    def resized(self, batch_size: int) -> "SampledBatches":
        """Return batches of another size from the same samples, in the same order."""
        one, samples = self.sampler, self.samples
        sampler = BatchSampler(
            samples.size,
            batch_size,
            shuffle=one.shuffle,
            drop_last=one.drop_last,
            seed=one.seed,
            rank=one.rank,
            world_size=one.world_size,
            order=samples.bucketed(samples.order(shuffle=one.shuffle), batch_size),
        )
        return SampledBatches(samples, sampler)

    def shared(self, rank: int, world_size: int) -> "SampledBatches":
        """Return the same batches with the share of rank `rank`."""
        return SampledBatches(self.samples, self.sampler.shared(rank, world_size))


class BatchTransform:
    """A function of a batch's inputs; if it takes a `generator`, it gets one seeded by the batch's position."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self._random = _takes_generator(transform)

    def __call__(self, batch: Batch, *place: int) -> Batch:
        """Apply it to the `data` of a DataBatch, or to the whole batch; `place` is the input of the seed."""
        inputs = batch.data if isinstance(batch, DataBatch) else batch
        if self._random:
            tensor = next(tensors_in(inputs), None)
            generator = torch.Generator("cpu" if tensor is None else tensor.device)
            generator.manual_seed(mix(*place))
            inputs = self.transform(inputs, generator=generator)
        else:
            inputs = self.transform(inputs)
        return DataBatch(inputs, batch.labels) if isinstance(batch, DataBatch) else inputs


def _decodes(data: Any) -> bool:
    return isinstance(data, DecodingSource) and data.decodes


def _takes_generator(transform: Transform) -> bool:
    try:
        return "generator" in inspect.signature(transform).parameters
    except ValueError:  # a builtin without a signature
        return False


def _check_options(data: Any, labels: Any, collate_fn: Collate | None, bucket_batches: int) -> None:
    """Raise DataError for options that do not apply to the kind of data."""
    in_memory, kind = is_in_memory(data), type(data).__name__
    if collate_fn is not None and (in_memory or isinstance(data, BatchSource)):
        raise DataError(
            f"collate_fn combines the samples of a dataset, but a {kind} returns whole batches; use transform instead"
        )
    if bucket_batches and not isinstance(data, MeasuredSource):
        raise DataError(
            f"bucket_batches is {bucket_batches}, but a {kind} does not know the lengths of its samples; use a "
            "source such as TokenDocuments, or set it to 0"
        )
    if isinstance(labels, int) and not in_memory:
        raise DataError(f"labels is the number {labels}; pass the batch size by name: batch_size={labels}")
    if labels is not None and not in_memory:
        raise DataError("labels are for tensors, arrays and tables; return them in the samples of a dataset")


@cache
def say_unused(num_workers: int) -> None:
    """Warn once that the data does not use worker processes."""
    logger.warning(
        f"num_workers is {num_workers}, but tensors and token files are read in the training process, which is "
        "faster; remove it"
    )
