"""The loader: batches of tensors, token files or a map-style dataset, from any position of any epoch.

Below it is what all loaders share: the iterator over an epoch, prefetching, transforms of whole batches.
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from etude.core.arguments import as_device
from etude.core.batch import Batch, DataBatch, in_pinned_memory, tensors_in, to_device
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order import BatchSampler, Order, SequentialOrder, ShuffledOrder
from etude.data.order.mixed import BucketOrder
from etude.data.parts import tensors_of
from etude.data.sources.base import BatchSource, GatheredBatches, MeasuredSource, OrderedSource
from etude.data.sources.memory import TensorSource, is_in_memory
from etude.data.sources.workers import Collate, DatasetSource, WorkerSettings, dataset_length
from etude.data.text import TokenDocuments
from etude.data.tokens import open_tokens
from etude.data.transfer.cuda import SideStream, ahead
from etude.data.transfer.prefetch import prefetch_stream


class DataLoader:
    """Batches in an order that is a pure function of (seed, epoch, position).

    `data` is a tensor, a NumPy array, a table of pandas, a pair (data, labels), a mapping or a `TensorData` of them,
    held in memory and gathered by one vectorised copy per batch; a source that gathers batches itself, such as
    `TokenBlocks`; the path of a token file, read as padded documents; or a map-style dataset whose samples are fetched
    one by one, in worker processes if asked for. Arrays and tables of float64 become torch's default type, float32.
    Tensors give a `DataBatch(data, labels)`, a mapping or a token file gives dicts, a dataset what `collate_fn` makes.

    >>> loader = DataLoader(torch.arange(5), torch.arange(5) % 2, batch_size=2, shuffle=False)
    >>> [batch.data.tolist() for batch in loader]
    [[0, 1], [2, 3], [4]]
    >>> list(loader.iterate(epoch=3, position=4))
    [DataBatch(data=tensor([4]), labels=tensor([0]))]

    Arguments:
        batch_size: samples per batch over all ranks.
        bucket_batches: put samples of similar length together, looking over this many batches at a time, so that
            little is padded; 0 does not. For sources that tell the lengths of their samples.
        prefetch: batches made ready beforehand. In memory, by a background thread; of a dataset, only the copies
            to a CUDA device are made beforehand, as its workers have their own `prefetch_factor`.
        transform: applied to the `data` of each batch (or to the whole batch, where it is no `DataBatch`), on
            `device`. One that draws random numbers takes a keyword `generator`, seeded for each batch. One with an
            attribute `elementwise = True` may be given several batches at once.
        device: where batches are delivered; to CUDA they travel from pinned memory without waiting.
        pin_memory: deliver batches in pinned memory; by default if `device` is CUDA. No effect without CUDA.
        num_workers, persistent_workers, prefetch_factor: as in torch, for datasets. Without effect for all else,
            which is faster without workers.
        collate_fn: makes a batch of the samples of a dataset.

    A dataset's random augmentations are seeded by (seed, epoch, index), so batches do not depend on the number of
    workers or ranks. Raises DataError for data that is empty, of different lengths or of an unknown kind.
    """

    def __init__(
        self,
        data: Any,
        labels: Any = None,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        prefetch: int = 0,
        seed: int = 0,
        *,
        bucket_batches: int = 0,
        transform: Callable[..., Any] | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool | None = None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Collate | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if min(prefetch, num_workers, bucket_batches) < 0:
            raise DataError(
                f"prefetch is {prefetch}, num_workers is {num_workers} and bucket_batches is {bucket_batches}; "
                f"none of them may be negative"
            )
        if isinstance(data, (str, Path)):
            data = TokenDocuments(open_tokens(data))
        data, labels, transform = tensors_of(data, labels, transform)
        self.data, self.labels = data, labels
        self.batch_size, self.shuffle, self.prefetch = batch_size, shuffle, prefetch
        self.transform, self.device = transform, None if device is None else as_device(device)
        self._to_cuda = self.device is not None and self.device.type == "cuda"
        pin = (self._to_cuda if pin_memory is None else pin_memory) and torch.cuda.is_available()
        # A batch for another device is pinned before its copy, one that stays is pinned after the transform.
        pin_last = pin and self.device is None and transform is not None
        self._pin_last, self._pin_first = pin_last, pin and not pin_last
        self._source: TensorSource | GatheredBatches | DatasetSource
        order: Order | None = None
        if collate_fn is not None and (is_in_memory(data) or isinstance(data, BatchSource)):
            raise DataError(
                f"collate_fn puts the samples of a dataset together, but a {type(data).__name__} makes whole batches; "
                f"change them with transform instead"
            )
        self._transform = None if transform is None else BatchTransform(transform)
        if is_in_memory(data):
            self._source = self._in_memory(data, labels)
            num_samples = self._source.num_samples
        elif isinstance(data, BatchSource):
            _refuse_labels(labels)
            device_now = self.device if self._to_cuda else None
            self._source = GatheredBatches(data, seed, device=device_now, pin_memory=self._pin_first)
            num_samples = len(data)
            order = data.order(shuffle=shuffle, seed=seed) if isinstance(data, OrderedSource) else None
        else:
            _refuse_labels(labels)
            num_samples = dataset_length(data)
            settings = WorkerSettings(num_workers, self._pin_first, persistent_workers, prefetch_factor)
            self._source = DatasetSource(data, seed, collate_fn, settings)
        if bucket_batches:
            order = order or (ShuffledOrder(num_samples, seed) if shuffle else SequentialOrder(num_samples))
            order = _bucketed(order, data, batch_size, bucket_batches, seed)
        here = not isinstance(self._source, DatasetSource) and self._source.device == self.device
        self._target = None if here else self.device
        self.sampler = BatchSampler(
            num_samples,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
            order=order,
        )
        self.num_batches = self.sampler.num_batches
        self.epoch = 0
        """The epoch that the next `for` or `reset` begins."""
        self._current: EpochIterator | None = None

    def _in_memory(self, data: Any, labels: Any) -> TensorSource:
        """Return the source of data in memory; for a CUDA device it does all that can be done to several batches."""
        if not self._to_cuda:
            return TensorSource(data, labels, pin_memory=self._pin_first)
        transform = self.transform if is_elementwise(self.transform) and not isinstance(data, Mapping) else None
        if transform is not None:
            self._transform = None
        return TensorSource(data, labels, pin_memory=self._pin_first, device=self.device, transform=transform)

    def __len__(self) -> int:
        return self.num_batches

    def iterate(self, epoch: int, position: int = 0) -> "EpochIterator":
        """Return the batches of `epoch` from sample `position` on."""
        if not 0 <= position <= self.sampler.epoch_samples:
            raise DataError(
                f"cannot start at sample {position}: an epoch has {self.sampler.epoch_samples} samples; "
                f"does the checkpoint belong to other data?"
            )
        batches = self._source.batches(self.sampler, epoch, position)
        if self._target is not None or self._transform is not None or self._pin_last:
            batches = self._finished(batches, epoch, position)
        items = zip(self.sampler.positions(position), batches, strict=False)
        threaded = not isinstance(self._source, DatasetSource)
        return deliver(items, batches, position, prefetch=self.prefetch, device=self.device, threaded=threaded)

    def _finished(self, batches: Iterator[Batch], epoch: int, position: int) -> Iterator[Batch]:
        """Each batch where and how it is wanted."""
        next_position, target = self.sampler.next_position, self._target
        for batch in batches:
            if target is not None:
                batch = to_device(batch, target)
            if self._transform is not None:
                batch = self._transform(batch, self.sampler.seed, epoch, position, self.sampler.rank)
                position = next_position(position)
            yield in_pinned_memory(batch) if self._pin_last else batch

    # One epoch after the other, by plain iteration.

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `for` or `reset` begins."""
        self.epoch = epoch

    def __iter__(self) -> "EpochIterator":
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.iterate(epoch)

    def stream(self) -> Iterator[Batch]:
        """Return batches without end, epoch after epoch, beginning with the next one."""
        while True:
            epoch = iter(self)
            try:
                yield from epoch
            finally:
                epoch.close()

    # One batch at a time, by hand.

    @property
    def current_index(self) -> int:
        """Samples of the epoch under way that `next` has handed out, over all ranks."""
        return 0 if self._current is None else self._current.position

    def reset(self) -> None:
        """Begin the next epoch, with a new shuffle."""
        if self._current is not None:
            self._current.close()
        self._current = iter(self)

    def has_next(self) -> bool:
        """Whether the epoch under way has another batch."""
        return self.sampler.has_batch(self.current_index)

    def next(self) -> Batch:
        """Return the next batch of the epoch under way; raises DataError at its end."""
        if self._current is None:
            self.reset()
        if not self.has_next():
            raise DataError("the epoch is over; call reset() to begin the next one")
        assert self._current is not None
        return next(self._current)


def _bucketed(order: Order, data: Any, batch_size: int, bucket_batches: int, seed: int) -> BucketOrder:
    if not isinstance(data, MeasuredSource):
        raise DataError(
            f"bucket_batches is {bucket_batches}, but a {type(data).__name__} does not tell how long its samples are; "
            f"bucketing is for samples of different lengths, such as TokenDocuments"
        )
    return BucketOrder(order, data.lengths, batch_size=batch_size, pool_batches=bucket_batches, seed=seed)


def _refuse_labels(labels: Any) -> None:
    if isinstance(labels, int):
        raise DataError(f"labels is the number {labels}; give the batch size by name: batch_size={labels}")
    if labels is not None:
        raise DataError("labels go with tensors, arrays and tables; the samples of a dataset carry their own")


class EpochIterator:
    """The batches of one epoch; `position` counts the samples handed out so far over all ranks."""

    __slots__ = ("__weakref__", "_close", "_items", "is_closed", "position")

    def __init__(self, items: Iterator[tuple[int, Batch]], position: int, close: Callable[[], None]) -> None:
        self._items, self._close = items, close
        self.position = position
        self.is_closed = False

    def __iter__(self) -> "EpochIterator":
        return self

    def __next__(self) -> Batch:
        self.position, batch = next(self._items)
        return batch

    def close(self) -> None:
        """Stop any prefetching; the iterator is then at its end. Safe to call twice."""
        self._close()
        self._items = iter(())
        self.is_closed = True

    def go_on_as(self, other: "EpochIterator") -> None:
        """Hand out the batches of another iterator from here on, from its position."""
        self._close()
        self._items, self._close, self.position = other._items, other._close, other.position


def deliver(
    items: Iterator[tuple[int, Batch]],
    batches: Iterator[Batch],
    position: int,
    *,
    prefetch: int,
    device: torch.device | None,
    threaded: bool,
) -> "EpochIterator":
    """Return the items, made beforehand as far as `prefetch` says; `batches` is closed with the iterator.

    Without `threaded` batches are made in this thread; only their copies to a CUDA device run ahead.
    """
    to_cuda = device is not None and device.type == "cuda"
    if prefetch == 0 or not (threaded or to_cuda):
        return EpochIterator(items, position, partial(_close, batches))
    if not to_cuda:
        stream = prefetch_stream(items, prefetch)
        return EpochIterator(stream, position, stream.close)
    assert device is not None
    side = SideStream(device)
    if threaded:
        staged = prefetch_stream(side.send(items), prefetch)
        return EpochIterator(side.receive(staged), position, staged.close)
    staged_items = ahead(side.send(items), prefetch)
    return EpochIterator(side.receive(staged_items), position, partial(_close, batches))


def _close(batches: Iterator[Batch]) -> None:
    if isinstance(batches, Generator):
        batches.close()


class BatchTransform:
    """A function of a batch's inputs; one that takes a `generator` gets it seeded from the batch's place."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform
        self._random = _takes_generator(transform)

    def __call__(self, batch: Batch, *place: int) -> Batch:
        """Apply it to the `data` of a DataBatch, or to the whole batch; `place` are the numbers of the seed."""
        inputs = batch.data if isinstance(batch, DataBatch) else batch
        if self._random:
            tensor = next(tensors_in(inputs), None)
            generator = torch.Generator("cpu" if tensor is None else tensor.device)
            generator.manual_seed(mix(*place))
            inputs = self.transform(inputs, generator=generator)
        else:
            inputs = self.transform(inputs)
        return DataBatch(inputs, batch.labels) if isinstance(batch, DataBatch) else inputs


def is_elementwise(transform: object) -> bool:
    """Whether a transform says that it changes every number by itself: several batches may go through it together."""
    return bool(getattr(transform, "elementwise", False))


def _takes_generator(transform: Callable[..., Any]) -> bool:
    try:
        return "generator" in inspect.signature(transform).parameters
    except ValueError:  # a builtin without a signature
        return False
