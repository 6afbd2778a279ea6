"""The loader: batches of one data set or of several named streams, from any position of any epoch."""

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from etude.core.batch import Batch
from etude.core.by_epoch import ByEpoch
from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.order.sampler import BatchSampler
from etude.data.sources.samples import Place, SampledBatches, Samples, say_unused
from etude.data.sources.streams import StreamBatches, StreamSource
from etude.data.sources.workers import Collate, DatasetSource
from etude.data.splits import Draw, Streams, tensors_of
from etude.data.transfer.epoch import EpochIterator, deliver


class DataLoader:
    """Batches in an order that is a pure function of (seed, epoch, position).

    `data` is a tensor, a NumPy array, a table of pandas, a pair (data, labels), a mapping or a `TensorData` of them,
    held in memory and gathered by one vectorised copy per batch; a source that gathers batches itself, such as
    `TokenBlocks`; the path of a token file, read as padded documents; or a map-style dataset whose samples are
    fetched one by one, in worker processes if configured. Arrays and tables of float64 become torch's default dtype,
    float32. Batches are a `DataBatch(data, labels)` for tensors, dicts for a mapping or a token file, and the result
    of `collate_fn` for a dataset.

    >>> loader = DataLoader(torch.arange(5), torch.arange(5) % 2, batch_size=2, shuffle=False)
    >>> [batch.data.tolist() for batch in loader]
    [[0, 1], [2, 3], [4]]
    >>> list(loader.iterate(epoch=3, position=4))
    [DataBatch(data=tensor([4]), labels=tensor([0]))]

    Arguments:
        batch_size: samples per batch over all ranks.
        bucket_batches: group samples of similar length within this many batches, so that
            there is little padding; 0 disables it. For sources that know the lengths of their samples.
        prefetch: batches prepared in advance by a background thread; for a dataset, only the copies to a CUDA device
            are made in advance, as its workers have their own `prefetch_factor`. By default 2 for a CUDA device
            and for decoded images, but 0 for data in memory and others on the CPU, where making a batch is
            faster than passing it between threads.
        transform: applied to the `data` of each batch (or to the whole batch, if it is not a `DataBatch`), on
            `device`. If it has a keyword `generator`, it gets one seeded for each batch. One with an
            attribute `elementwise = True` may receive several batches at once.
        device: where batches are delivered; copies to CUDA are asynchronous, from pinned memory.
        pin_memory: deliver batches in pinned memory; by default if `device` is CUDA. No effect without CUDA.
        num_workers, persistent_workers, prefetch_factor: as in torch, for datasets and for images that are decoded
            batch by batch. No effect for other data, which is faster without workers.
        collate_fn: builds a batch from the samples of a dataset.

    A dataset's random augmentations are seeded by (seed, epoch, index), so batches do not depend on the number of
    workers or ranks. Raises DataError for empty data, different lengths or an unknown kind of data.
    """

    def __init__(
        self,
        data: Any,
        labels: Any = None,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        prefetch: int | None = None,
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
        if min(prefetch or 0, num_workers, bucket_batches) < 0:
            raise DataError(
                f"prefetch is {prefetch}, num_workers is {num_workers} and bucket_batches is {bucket_batches}; they "
                "must not be negative"
            )
        data, labels, transform = tensors_of(data, labels, transform)
        samples = Samples(
            data,
            labels,
            seed=seed,
            place=Place.of(device, pin_memory),
            transform=transform,
            collate_fn=collate_fn,
            bucket_batches=bucket_batches,
            workers={
                "num_workers": num_workers,
                "persistent_workers": persistent_workers,
                "prefetch_factor": prefetch_factor,
            },
        )
        # other loaders run beside a training
        if num_workers and shuffle and not isinstance(samples.source, DatasetSource):
            say_unused(num_workers)
        sampler = BatchSampler(
            samples.size,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
            order=samples.bucketed(samples.order(shuffle=shuffle), batch_size),
        )
        self.data, self.labels, self.transform = samples.data, labels, transform
        self._set(batch_size, shuffle, samples.prefetch if prefetch is None else prefetch, samples.place)
        self._read(SampledBatches(samples, sampler))

    def _set(self, batch_size: int, shuffle: bool, prefetch: int, place: Place) -> None:
        self.batch_size, self.shuffle, self.prefetch, self.device = batch_size, shuffle, prefetch, place.device
        self.batch_sizes: dict[int, int] | None = None
        """The schedule {epoch: size}, if the size changes."""
        self.epoch = 0
        """The epoch of the next `for` or `reset`."""
        self._current: EpochIterator | None = None

    def _read(self, source: SampledBatches | StreamBatches) -> None:
        """Read batches from this source from the next iteration on."""
        self._source: SampledBatches | StreamBatches = source
        self._resized: dict[int, SampledBatches] = {}
        self.rank, self.world_size = source.rank, source.world_size
        self.epoch_samples, self.num_batches = source.epoch_samples, source.num_batches

    @property
    def sampler(self) -> BatchSampler:
        """The sampler: which samples make up each batch."""
        assert isinstance(self._source, SampledBatches), "streams have a plan instead of a sampler; use a DataLoader"
        return self._source.sampler

    def indices(self, epoch: int, position: int) -> list[int] | None:
        """Return the indices in the data of this rank's batch at a position of an epoch; None for streams."""
        return self.drawn(epoch, position)[""].tolist() if isinstance(self._source, SampledBatches) else None

    def drawn(self, epoch: int, position: int) -> dict[str, Indices]:
        """Return the indices in the data of this rank's batch at a position of an epoch, by stream; "" without streams.

        >>> loader = DataLoader(torch.arange(5), batch_size=4, shuffle=False)
        >>> [loader.shared(rank, 3).drawn(0, 0)[""].tolist() for rank in range(3)]
        [[0], [1], [2, 3]]
        """
        return self._source_of(epoch).drawn(epoch, position)

    @property
    def can_use_workers(self) -> bool:
        """Whether worker processes can make its batches: samples of a dataset, and decoded images."""
        return isinstance(self._source, SampledBatches) and self._source.samples.can_use_workers

    def __len__(self) -> int:
        return self.num_batches

    def batch_size_in(self, epoch: int) -> int:
        """Return the size of the batches of an epoch."""
        return self.batch_size if self.batch_sizes is None else ByEpoch("batch_size", self.batch_sizes).at(epoch)

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches in an epoch."""
        return self._source_of(epoch).num_batches

    def batches_from(self, epoch: int, position: int) -> int | None:
        """Return the number of batches in an epoch from sample `position` on; None for streams.

        >>> DataLoader(torch.arange(10), batch_size=4).batches_from(epoch=0, position=5)
        2
        """
        source = self._source_of(epoch)
        if not isinstance(source, SampledBatches):
            return None
        left, size = max(0, source.epoch_samples - position), self.batch_size_in(epoch)
        return left // size if source.sampler.drop_last else -(-left // size)

    def resized(self, batch_sizes: Mapping[int, int]) -> Self:
        """Return a loader of the same samples in the same order, whose batches have another size from some epochs on.

        Every epoch has every sample once. Raises DataError for streams.

        >>> loader = DataLoader(torch.arange(5), batch_size=2, shuffle=False).resized({0: 2, 1: 4})
        >>> [batch.data.tolist() for batch in loader.iterate(epoch=1)]
        [[0, 1, 2, 3], [4]]
        """
        if not isinstance(self._source, SampledBatches):
            raise DataError("streams have batches of one size; set batch_size to a number")
        schedule, mine = ByEpoch("batch_size", batch_sizes), copy.copy(self)
        mine._read(self._source.resized(schedule.at(0)))
        mine.batch_size, mine.batch_sizes = schedule.at(0), dict(batch_sizes)
        return mine

    def _source_of(self, epoch: int) -> SampledBatches | StreamBatches:
        if self.batch_sizes is None or not isinstance(self._source, SampledBatches):
            return self._source
        size = self.batch_size_in(epoch)
        if size not in self._resized:
            self._resized[size] = self._source.resized(size)
        return self._resized[size]

    def shared(self, rank: int, world_size: int) -> Self:
        """Return a loader of the same batches that gives rank `rank` its share of each."""
        mine = copy.copy(self)
        mine._read(self._source.shared(rank, world_size))
        return mine

    def in_order(self) -> Self:
        """Return a loader of every sample once, in the order of the data. Raises DataError for streams."""
        if not isinstance(self._source, SampledBatches):
            raise DataError("samples of several streams have no common order; use the loader of one stream")
        samples, ordered = self._source.samples, copy.copy(self)
        sampler = BatchSampler(samples.size, self.batch_size, shuffle=False, order=samples.order(shuffle=False))
        ordered.shuffle, ordered.batch_sizes = False, None
        ordered._read(SampledBatches(samples, sampler.shared(self.rank, self.world_size)))
        return ordered

    def iterate(self, epoch: int, position: int = 0) -> EpochIterator:
        """Return the batches of `epoch` from sample `position` on."""
        source = self._source_of(epoch)
        if not 0 <= position <= source.epoch_samples:
            raise DataError(
                f"cannot start at sample {position}: an epoch has only {source.epoch_samples} samples; use the data "
                "of the checkpoint"
            )
        items, batches = source.items(epoch, position)
        return deliver(items, batches, position, prefetch=self.prefetch, device=self.device, threaded=source.threaded)

    # One epoch after the other, by plain iteration.

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next `for` or `reset`."""
        self.epoch = epoch

    def __iter__(self) -> EpochIterator:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.iterate(epoch)

    def stream(self) -> Iterator[Batch]:
        """Return endless batches, epoch after epoch, starting with the next one."""
        while True:
            epoch = iter(self)
            try:
                yield from epoch
            finally:
                epoch.close()

    # One batch at a time, by hand.

    @property
    def current_index(self) -> int:
        """Samples of the current epoch returned by `next` so far, over all ranks."""
        return 0 if self._current is None else self._current.position

    def reset(self) -> None:
        """Begin the next epoch, with a new shuffle."""
        if self._current is not None:
            self._current.close()
        self._current = iter(self)

    def has_next(self) -> bool:
        """Whether the current epoch has another batch."""
        return self._source_of(max(0, self.epoch - 1)).has_batch(self.current_index)

    def next(self) -> Batch:
        """Return the next batch of the current epoch; raises DataError at its end."""
        if self._current is None:
            self.reset()
        if not self.has_next():
            raise DataError("the epoch is over; call reset() to begin the next one")
        assert self._current is not None
        return next(self._current)


class StreamLoader(DataLoader):
    """Batches of named streams, in an order that is a pure function of (seed, epoch, position) and the mixture.

    In training every stream is endless: it repeats passes over its samples without replacement, each with a new
    shuffle, and an epoch is a fixed number of samples. Every batch is full, and is a dict with the stream's name
    under "stream"; with `draw="together"` a `JointBatch` of such dicts, one per stream. Evaluation reads every stream
    once, one after the other.

    >>> loader = StreamLoader({"a": torch.arange(6), "b": torch.arange(100, 102)}, 2, weights={"a": 1, "b": 1})
    >>> sorted(batch["stream"] for batch in loader)
    ['a', 'a', 'b', 'b']
    >>> loader.choose(only=["b"])
    True
    >>> [sorted(batch["input"].tolist()) for batch in loader.iterate(epoch=3)]
    [[100, 101], [100, 101], [100, 101], [100, 101]]

    Arguments:
        streams: a part of a data set, or a mapping of them by name; `weights`, `draw` and `epoch_samples` are those
            of `Streams`, and take precedence over it.
        batch_size: samples per batch over all ranks. All ranks read the same stream in a step.
        shuffle: by default in training only.
        training: endless streams in the given proportions; otherwise each sample of each stream once.
        drop_last: round the samples of a training epoch down to full batches, not up.
        prefetch, device, pin_memory: as for `DataLoader`, but nothing is prefetched by default.

    Raises DataError for empty streams, unknown kinds of data and invalid weights.
    """

    def __init__(
        self,
        streams: Streams | Mapping[str, Any],
        batch_size: int = 32,
        *,
        shuffle: bool | None = None,
        training: bool = True,
        weights: Mapping[str, float] | None = None,
        draw: Draw | None = None,
        epoch_samples: int | None = None,
        drop_last: bool = False,
        prefetch: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        pin_memory: bool | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        asked = {"weights": weights, "draw": draw, "epoch_samples": epoch_samples}
        changes: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
        self.data = replace(streams if isinstance(streams, Streams) else Streams(streams), **changes)
        prefetch = prefetch or 0
        if batch_size < 1 or prefetch < 0:
            raise DataError(f"batch_size is {batch_size} and prefetch is {prefetch}; they must be at least 1 and 0")
        shuffle, place = training if shuffle is None else shuffle, Place.of(device, pin_memory)
        self.training, self.drop_last, self.seed = training, drop_last, seed
        self._streams = StreamSource(
            self.data, batch_size, shuffle=shuffle, training=training, drop_last=drop_last, seed=seed, place=place
        )
        self._under_way: list[tuple[weakref.ref[EpochIterator], int]] = []
        """Iterators that may still be open, with their epochs."""
        self.mixture = self._streams.mix(None, None, None)
        self._set(batch_size, shuffle, prefetch, place)
        self._read(self._streams.batches(self.mixture, rank, world_size))

    def shared(self, rank: int, world_size: int) -> Self:
        """Return a loader of the same batches that gives rank `rank` its share of each."""
        mine = super().shared(rank, world_size)
        mine._under_way = []
        return mine

    def choose(
        self,
        weights: Mapping[str, float] | None = None,
        sequence_length: int | None = None,
        only: Collection[str] | None = None,
        position: int | None = None,
    ) -> bool:
        """Change what is read; return whether anything changed.

        weights: proportions in training; omitted streams are not read. Default: the loader's original weights.
        sequence_length: tokens per sample, at most those of the data section. Default: each stream's own.
        only: the streams that are read; their relative proportions do not change.
        position: where the current epoch continues with it. Default: it applies from the next `iterate` on.

        The order depends only on the choice, not on earlier ones. Raises DataError for unknown streams, an invalid
        length, or if no stream is left; then nothing changes.
        """
        mixture = self._streams.mix(weights, sequence_length, only)
        if mixture == self.mixture:
            return False
        self._read(self._streams.batches(mixture, self.rank, self.world_size))
        self.mixture = mixture
        if position is not None:
            for batches, epoch in self._still_open():
                batches.go_on_as(super().iterate(epoch, position))
        return True

    def iterate(self, epoch: int, position: int = 0) -> EpochIterator:
        """Return the batches of `epoch` from sample `position` on."""
        batches = super().iterate(epoch, position)
        kept = [(weakref.ref(one), its_epoch) for one, its_epoch in self._still_open()]
        self._under_way = [*kept, (weakref.ref(batches), epoch)]
        return batches

    def _still_open(self) -> list[tuple[EpochIterator, int]]:
        """Return the iterators that are not exhausted: others than that of the training may exist."""
        found = [(batches, epoch) for ref, epoch in self._under_way if (batches := ref()) is not None]
        return [(batches, epoch) for batches, epoch in found if not batches.is_closed]
