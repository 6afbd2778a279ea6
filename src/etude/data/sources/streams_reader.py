"""One stream of a loader: any part of a data set, read in an order of its own, as batches that carry its name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import STREAM, Batch, in_pinned_memory, map_tensors, to_device
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.loader import BatchTransform
from etude.data.order import Indices, Order, SequentialOrder, ShuffledOrder
from etude.data.order.mixed import BucketOrder
from etude.data.order.streams import EndlessOrder, Span, stable_number
from etude.data.parts import LoaderData, TensorData
from etude.data.sources.base import BatchSource, MeasuredSource, OrderedSource, ResizableSource, send
from etude.data.sources.memory import TensorSource, is_in_memory
from etude.data.sources.workers import Collate, SeededSamples, dataset_length
from etude.data.text import TokenDocuments
from etude.data.tokens import open_tokens

OPTIONS = ("bucket_batches", "collate_fn", "transform")
"""Options of a `LoaderData` that streams know."""


class InMemory:
    """Tensors as a source of batches."""

    def __init__(self, data: Any, labels: Any) -> None:
        self.tensors = TensorSource(data, labels)

    def __len__(self) -> int:
        return self.tensors.num_samples

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> Batch:  # noqa: ARG002
        """Return the rows at `indices`."""
        return self.tensors.gather(indices)


class Fetched:
    """A map-style dataset as a source of batches, its random numbers seeded by (seed, epoch, index)."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate
        self.size = dataset_length(dataset)
        self._samples: SeededSamples | None = None

    def __len__(self) -> int:
        return self.size

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> Batch:
        """Return the samples at `indices`; the caller's generators are left as they were."""
        if self._samples is None or self._samples.seed != seed:
            self._samples = SeededSamples(self.dataset, self.collate, seed)
        return self._samples[epoch, indices.tolist()]


@dataclass(frozen=True)
class Delivery:
    """How batches leave a loader: to which device, for which rank."""

    device: torch.device | None = None
    pin_memory: bool = False
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Stream:
    """What is read under a name."""

    name: str
    source: BatchSource
    seed: int
    """Of its own: other streams that come or go change nothing here."""
    transform: BatchTransform | None = None
    bucket_batches: int = 0

    @classmethod
    def of(cls, name: str, part: Any, seed: int) -> "Stream":
        """Return the stream of a part of a data set; raises DataError if it is empty or of an unknown kind."""
        options: dict[str, Any] = {}
        labels = None
        if isinstance(part, LoaderData):
            part, options = part.data, dict(part.options)
        if isinstance(part, TensorData):
            part, labels, options = part.data, part.labels, {"transform": part.transform, **options}
        if unknown := [key for key, value in options.items() if key not in OPTIONS and value]:
            raise DataError(
                f"stream '{name}' sets {', '.join(unknown)}; the options of a stream are {', '.join(OPTIONS)}"
            )
        collate, transform = options.get("collate_fn"), options.get("transform")
        source: BatchSource
        if isinstance(part, (str, Path)):
            part = TokenDocuments(open_tokens(part))
        if collate is not None and (is_in_memory(part) or isinstance(part, BatchSource)):
            raise DataError(f"stream '{name}' sets collate_fn, but a {type(part).__name__} makes whole batches")
        if is_in_memory(part):
            source = InMemory(part, labels)
        elif isinstance(part, BatchSource):
            source = part
        else:
            source = Fetched(part, collate)
        if len(source) < 1:
            raise DataError(f"stream '{name}' is empty: there is no sample to make a batch of")
        return cls(
            name,
            source,
            mix(seed, stable_number(name)),
            None if transform is None else BatchTransform(transform),
            options.get("bucket_batches", 0),
        )

    @property
    def threaded(self) -> bool:
        """Whether another thread may read it: fetching samples of a dataset seeds generators that all threads share."""
        return not isinstance(self.source, Fetched)

    def with_length(self, length: int) -> "Stream":
        """Return the stream with samples of `length` tokens; DataError if it has none or cannot be that long."""
        source = self.source
        if not isinstance(source, ResizableSource):
            raise DataError(
                f"sequence_length is {length}, but stream '{self.name}' has no token sequences to cut (tokens, "
                f"text_corpus …); leave it out, or make the sequences shorter"
            )
        if length < 1:
            raise DataError(f"sequence_length is {length}; a sample has at least 1 token")
        if source.longest is not None and length > source.longest:
            raise DataError(
                f"sequence_length {length} is more than the {source.longest} tokens that samples of stream "
                f"'{self.name}' have; choose a smaller one, or raise the length of the stream"
            )
        return self if length == source.longest else replace(self, source=source.with_length(length))

    def order(self, *, shuffle: bool) -> Order:
        """Return the order of one pass over the samples."""
        if isinstance(self.source, OrderedSource):
            return self.source.order(shuffle=shuffle, seed=self.seed)
        size = len(self.source)
        return ShuffledOrder(size, self.seed) if shuffle else SequentialOrder(size)


class StreamReader:
    """The batches of a stream, by spans of its order: pass after pass in training, one pass in evaluation."""

    def __init__(self, stream: Stream, delivery: Delivery, *, shuffle: bool, endless: bool, batch_size: int) -> None:
        self.stream, self.delivery, self.endless = stream, delivery, endless
        order = stream.order(shuffle=shuffle)
        self.size = order.size
        """Samples of a pass."""
        self.order = self._bucketed(EndlessOrder(order) if endless else order, batch_size)

    def _bucketed(self, order: Order, batch_size: int) -> Order:
        wanted, source = self.stream.bucket_batches, self.stream.source
        if wanted and not isinstance(source, MeasuredSource):
            raise DataError(
                f"stream '{self.stream.name}' sets bucket_batches, but a {type(source).__name__} does not tell "
                f"how long its samples are"
            )
        # A pool that holds a large part of a pass and of the next one has samples twice, side by side when sorted.
        pool = min(wanted, self.size // (2 * batch_size)) if self.endless else wanted
        if pool < (2 if self.endless else 1):
            return order
        assert isinstance(source, MeasuredSource)
        return BucketOrder(order, source.lengths, batch_size=batch_size, pool_batches=pool, seed=self.stream.seed)

    def read(self, epoch: int, span: Span) -> dict[str, Any]:
        """Return this rank's share of a span; `epoch` counts in evaluation, in training the pass does."""
        stream, delivery = self.stream, self.delivery
        epoch, count = span.start // self.size if self.endless else epoch, span.stop - span.start
        start = span.start + count * delivery.rank // delivery.world_size
        stop = span.start + count * (delivery.rank + 1) // delivery.world_size
        indices = self.order.indices(0 if self.endless else epoch, start, stop)
        batch = self._gather(indices, epoch)
        if delivery.device is not None:
            batch = self._sent(batch)
        if stream.transform is not None:
            batch = stream.transform(batch, stream.seed, epoch, span.start, delivery.rank)
        if delivery.pin_memory and delivery.device is None:
            batch = in_pinned_memory(batch)
        return named(batch, stream.name)

    def _gather(self, indices: Indices, epoch: int) -> Batch:
        source, seed = self.stream.source, self.stream.seed
        if len(indices):
            return source.gather(indices, epoch=epoch, seed=seed)
        # This rank's share is empty: the form of a batch, with no samples in it.
        some = source.gather(np.zeros(1, np.int64), epoch=epoch, seed=seed)
        return map_tensors(some, lambda tensor: tensor[:0])

    def _sent(self, batch: Batch) -> Batch:
        device, pin = self.delivery.device, self.delivery.pin_memory
        assert device is not None
        source = self.stream.source
        if isinstance(source, (InMemory, Fetched)):
            return to_device(in_pinned_memory(batch) if pin else batch, device)
        return batch if device.type == "cpu" else send(batch, device, pin_memory=pin)


def named(batch: Batch, name: str) -> dict[str, Any]:
    """Return a batch of any form as a dict that carries the name of its stream.

    >>> named((torch.zeros(2), torch.tensor([0, 1])), "digits")
    {'input': tensor([0., 0.]), 'labels': tensor([0, 1]), 'stream': 'digits'}
    """
    if isinstance(batch, Mapping):
        if STREAM in batch:
            raise DataError(f"batches of stream '{name}' have a '{STREAM}' already: that key is taken by the name")
        return {**batch, STREAM: name}
    if isinstance(batch, Tensor):
        return {"input": batch, STREAM: name}
    if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2:
        values = zip(("input", "labels"), batch, strict=False)
        return {key: value for key, value in values if value is not None} | {STREAM: name}
    found = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise DataError(
        f"batches of stream '{name}' are a {type(batch).__name__}{found}; "
        f"a stream takes tensors, (input, labels) or mappings"
    )
