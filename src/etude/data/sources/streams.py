"""Several named sources: batches of one or all of them, in proportions that can change between epochs."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from etude.core.batch import STREAM, Batch, JointBatch
from etude.core.errors import DataError
from etude.core.random import mix
from etude.core.spelling import listed
from etude.data.order.permutation import Indices, Order
from etude.data.order.sampler import check_rank, share
from etude.data.order.streams import (
    SMALLEST_SHARE,
    AlternatingPlan,
    SequentialPlan,
    Span,
    StreamPlan,
    TogetherPlan,
    stable_number,
)
from etude.data.sources.base import ResizableSource
from etude.data.sources.samples import Place, Samples
from etude.data.splits import LoaderData, Streams, check_known, check_weights, tensors_of

OPTIONS = ("bucket_batches", "collate_fn", "transform")
"""Options of a `LoaderData` that streams support."""


class Mixture(NamedTuple):
    """The current selection."""

    shares: tuple[tuple[str, float], ...]
    """Streams and their shares of all samples, which sum to 1."""
    sequence_length: int | None


class StreamSource:
    """The streams of a loader, and the batches of any mixture of them."""

    def __init__(
        self,
        data: Streams,
        batch_size: int,
        *,
        shuffle: bool,
        training: bool,
        drop_last: bool,
        seed: int,
        place: Place,
    ) -> None:
        self.data, self.batch_size, self.seed, self.place = data, batch_size, seed, place
        self.shuffle, self.training = shuffle, training
        self._streams = {name: self._open(name, part) for name, part in data.parts.items()}
        self._cut: dict[tuple[str, int], Samples] = {}
        self._sizes = {name: stream.order(shuffle=shuffle).size for name, stream in self._streams.items()}
        samples = data.epoch_samples or sum(self._sizes.values())
        self._num_batches = max(1, samples // batch_size if drop_last else -(-samples // batch_size))

    def _open(self, name: str, part: Any) -> Samples:
        options: dict[str, Any] = {}
        if isinstance(part, LoaderData):
            part, options = part.data, dict(part.options)
        if unknown := [key for key, value in options.items() if key not in OPTIONS and value]:
            raise DataError(
                f"stream '{name}' sets {', '.join(unknown)}; the options of a stream are {', '.join(OPTIONS)}"
            )
        data, labels, transform = tensors_of(part, None, options.get("transform"))
        own = {key: options[key] for key in ("bucket_batches", "collate_fn") if options.get(key)}
        try:
            # A separate seed: adding or removing other streams changes nothing here.
            seed = mix(self.seed, stable_number(name))
            samples = Samples(data, labels, seed=seed, place=self.place, transform=transform, **own)
        except DataError as error:
            raise DataError(f"stream '{name}': {error}") from error
        if samples.size < 1:
            raise DataError(f"stream '{name}' is empty; add samples or remove it")
        return samples

    # The selection.

    def mix(
        self, weights: Mapping[str, float] | None, sequence_length: int | None, only: Collection[str] | None
    ) -> Mixture:
        """Return the selection; see `StreamLoader.choose`."""
        known = (*self._streams, *sorted(self.data.absent))
        if weights is not None:
            check_weights(weights, known)
        if only is not None:
            check_known(only, known, "only")
        read = [name for name in self._streams if only is None or name in only]
        if not self.training:
            return Mixture(tuple((name, 1 / len(read)) for name in read), sequence_length)
        weights = weights if weights is not None else self.data.weights
        parts = self._by_size(read) if weights is None else {name: float(weights.get(name, 0)) for name in read}
        largest = max(parts.values(), default=0.0)
        if largest == 0:
            why = "there is none of them here" if not read else "their weights are 0"
            raise DataError(f"the selected streams are {listed(only or ())}, but {why}; set a weight for one of them")
        scaled = {name: weight / largest for name, weight in parts.items() if weight > 0}
        total = sum(scaled.values())
        shares = {name: weight / total for name, weight in scaled.items()}
        for name, part in shares.items():
            if part < SMALLEST_SHARE / 2:
                raise DataError(f"the weight {parts[name]} of stream '{name}' is too small beside {largest}")
        return Mixture(tuple(shares.items()), sequence_length)

    def _by_size(self, names: list[str]) -> dict[str, float]:
        total = sum(self._sizes[name] for name in names)
        return {name: max(self._sizes[name] / total, SMALLEST_SHARE) for name in names}

    def batches(self, mixture: Mixture, rank: int, world_size: int) -> "StreamBatches":
        """Return the batches of a mixture with the share of rank `rank`."""
        shares, size = dict(mixture.shares), self.batch_size
        streams = {name: self._stream(name, mixture.sequence_length) for name in shares}
        orders = {name: stream.order(shuffle=self.shuffle) for name, stream in streams.items()}
        plan: StreamPlan
        if not self.training:
            plan = SequentialPlan({name: order.size for name, order in orders.items()}, size)
        elif self.data.draw == "alternate":
            plan = AlternatingPlan(shares, size, self._num_batches, mix(self.seed, 11))
        else:
            plan = TogetherPlan(shares, size, self._num_batches)
        readers = {
            name: StreamReader(name, stream, orders[name], plan.counts[name], endless=self.training)
            for name, stream in streams.items()
        }
        return StreamBatches(plan, readers, rank, world_size)

    def _stream(self, name: str, length: int | None) -> Samples:
        if length is None:
            return self._streams[name]
        if (name, length) not in self._cut:
            self._cut[name, length] = self._with_length(name, length)
        return self._cut[name, length]

    def _with_length(self, name: str, length: int) -> Samples:
        """Return a stream in samples of `length` tokens; DataError if it has no tokens or is too short."""
        whole, part = self._streams[name], self.data.parts[name]
        source = whole.data
        if not isinstance(source, ResizableSource):
            raise DataError(
                f"sequence_length is {length}, but stream '{name}' has no token sequences (tokens, text_corpus …); "
                "remove sequence_length"
            )
        if length < 1 or (source.longest is not None and length > source.longest):
            raise DataError(
                f"sequence_length {length} is more than the {source.longest} tokens that samples of stream '{name}' "
                "have, or less than 1; choose another one, or increase the length of the stream"
            )
        if length == source.longest:
            return whole
        options = part.options if isinstance(part, LoaderData) else {}
        return self._open(name, LoaderData(source.with_length(length), options))


class StreamReader:
    """The batches of a stream, as spans of its order: endless in training, one pass in evaluation."""

    def __init__(self, name: str, samples: Samples, order: Order, batch_size: int, *, endless: bool) -> None:
        self.name, self.samples, self.endless = name, samples, endless
        self.size = order.size
        """Samples per pass."""
        self.order = samples.bucketed(order, batch_size, endless=endless)

    def indices(self, epoch: int, span: Span, rank: int, world_size: int) -> Indices:
        """Return the indices of the samples in a rank's share of a span."""
        _, start, stop = span
        if world_size > 1:
            start, stop = share(start, stop - start, rank, world_size)
        return self.order.indices(0 if self.endless else epoch, start, stop)

    def read(self, epoch: int, span: Span, rank: int, world_size: int) -> dict[str, Any]:
        """Return a rank's share of a span; randomness depends on `epoch` in evaluation, on the pass in training."""
        indices = self.indices(epoch, span, rank, world_size)
        epoch = span.start // self.size if self.endless else epoch
        return named(self.samples.read(indices, epoch=epoch, position=span.start, rank=rank), self.name)


class StreamBatches:
    """The batches of one mixture, according to a plan; later selections do not change it."""

    def __init__(self, plan: StreamPlan, readers: Mapping[str, StreamReader], rank: int, world_size: int) -> None:
        check_rank(rank, world_size)
        self.plan, self.readers, self.rank, self.world_size = plan, readers, rank, world_size
        self.epoch_samples, self.num_batches = plan.epoch_samples, plan.num_batches
        self.threaded = all(reader.samples.threaded for reader in readers.values())

    def has_batch(self, position: int) -> bool:
        """Whether a batch begins at `position`."""
        return position < self.epoch_samples

    def items(self, epoch: int, position: int) -> tuple[Iterator[tuple[int, Batch]], Iterator[Any]]:
        """Return the batches from `position` on, each with the position after it, and an object to close."""
        items = self._items(epoch, position)
        return items, items

    def _items(self, epoch: int, position: int) -> Iterator[tuple[int, Batch]]:
        rank, world_size, readers = self.rank, self.world_size, self.readers
        joint = isinstance(self.plan, TogetherPlan)
        while position < self.epoch_samples:
            spans = self.plan.spans(epoch, position)
            position += sum(span.stop - span.start for span in spans)
            parts = [readers[span.stream].read(epoch, span, rank, world_size) for span in spans]
            yield position, JointBatch(parts) if joint else parts[0]

    def drawn(self, epoch: int, position: int) -> dict[str, Indices]:
        """Return the indices of this rank's samples in the batch at `position`, by stream."""
        spans, rank, world_size = self.plan.spans(epoch, position), self.rank, self.world_size
        return {span.stream: self.readers[span.stream].indices(epoch, span, rank, world_size) for span in spans}

    def shared(self, rank: int, world_size: int) -> "StreamBatches":
        """Return the same batches with the share of rank `rank`."""
        return StreamBatches(self.plan, self.readers, rank, world_size)


def named(batch: Batch, name: str) -> dict[str, Any]:
    """Return a batch of any form as a dict with the name of its stream.

    >>> import torch
    >>> named((torch.zeros(2), torch.tensor([0, 1])), "digits")
    {'input': tensor([0., 0.]), 'labels': tensor([0, 1]), 'stream': 'digits'}
    """
    if isinstance(batch, Mapping):
        if STREAM in batch:
            raise DataError(f"batches of stream '{name}' have a '{STREAM}' already; rename that key")
        return {**batch, STREAM: name}
    if isinstance(batch, Tensor):
        return {"input": batch, STREAM: name}
    if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2:
        values = zip(("input", "labels"), batch, strict=False)
        return {key: value for key, value in values if value is not None} | {STREAM: name}
    found = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise DataError(
        f"batches of stream '{name}' are a {type(batch).__name__}{found}; a stream needs tensors, (input, labels) "
        "or mappings"
    )
