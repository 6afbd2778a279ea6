"""The loader over named streams: batches of one of them or of all, in proportions that can change between epochs."""

import copy
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from etude.core.arguments import as_device
from etude.core.batch import Batch, JointBatch
from etude.core.errors import DataError
from etude.core.random import mix
from etude.core.spelling import listed
from etude.data.loader import EpochIterator, deliver
from etude.data.order.streams import SMALLEST_SHARE, AlternatingPlan, Plan, SequentialPlan, TogetherPlan
from etude.data.parts import Draw, Streams, check_known, check_weights
from etude.data.sources.streams_reader import Delivery, Stream, StreamReader


class Mixture(NamedTuple):
    """What is read now."""

    shares: tuple[tuple[str, float], ...]
    """Streams and the part of all samples that each has, adding up to 1."""
    sequence_length: int | None


class StreamLoader:
    """Batches of named streams, in an order that is a pure function of (seed, epoch, position) and the mixture.

    In training every stream is endless: it goes through its samples without replacement, pass after pass, shuffled
    again each time, and an epoch is a fixed number of samples. Every batch is full, and is a dict with the stream's
    name under "stream"; with `draw="together"` a `JointBatch` of such dicts, one for each stream. In evaluation every
    stream comes once, one after the other.

    >>> loader = StreamLoader({"a": torch.arange(6), "b": torch.arange(100, 102)}, 2, weights={"a": 1, "b": 1})
    >>> sorted(batch["stream"] for batch in loader)
    ['a', 'a', 'b', 'b']
    >>> loader.choose(only=["b"])
    True
    >>> [sorted(batch["input"].tolist()) for batch in loader.iterate(epoch=3)]
    [[100, 101], [100, 101], [100, 101], [100, 101]]

    Arguments:
        streams: a part of a data set, or a mapping of them by name; `weights`, `draw` and `epoch_samples` are those
            of `Streams`, and come before what it says.
        batch_size: samples per batch over all ranks. The batches of a step are of the same stream on all ranks.
        shuffle: by default in training only.
        training: endless streams in the proportions asked for; else each sample of each stream once.
        drop_last: round the samples of a training epoch down to whole batches, not up.
        prefetch, device, pin_memory: as for `DataLoader`.

    Raises DataError for streams that are empty or of an unknown kind, and for weights that cannot be.
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
        prefetch: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
        pin_memory: bool | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        given = streams if isinstance(streams, Streams) else Streams(streams)
        self.data = Streams(
            given.parts,
            given.weights if weights is None else weights,
            given.draw if draw is None else draw,
            given.epoch_samples if epoch_samples is None else epoch_samples,
            given.absent,
        )
        if batch_size < 1 or prefetch < 0:
            raise DataError(f"batch_size is {batch_size} and prefetch is {prefetch}; at least 1 and 0 are needed")
        shuffle = training if shuffle is None else shuffle
        self.batch_size, self.shuffle, self.training, self.drop_last = batch_size, shuffle, training, drop_last
        self.prefetch, self.seed = prefetch, seed
        self.device = None if device is None else as_device(device)
        to_cuda = self.device is not None and self.device.type == "cuda"
        self._pin = (to_cuda if pin_memory is None else pin_memory) and torch.cuda.is_available()
        self.epoch = 0
        """The epoch that the next `for` begins."""
        self._streams = {name: Stream.of(name, part, seed) for name, part in self.data.parts.items()}
        self._sizes = {name: stream.order(shuffle=shuffle).size for name, stream in self._streams.items()}
        self._cut: dict[tuple[str, int], Stream] = {}
        self._under_way: list[tuple[weakref.ref[EpochIterator], int]] = []
        """Iterators that may still be open, with their epochs."""
        self._set_rank(rank, world_size)
        samples = self.data.epoch_samples or sum(self._sizes.values())
        self._training_batches = max(1, samples // batch_size if drop_last else -(-samples // batch_size))
        self.mixture = self._mixed(None, None, None)
        self._plan, self._readers = self._planned(self.mixture)

    def _set_rank(self, rank: int, world_size: int) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise DataError(f"rank {rank} of world_size {world_size}: rank must be in 0 … world_size-1")
        self.rank, self.world_size = rank, world_size
        self._delivery = Delivery(self.device, self._pin, rank, world_size)

    def shared(self, rank: int, world_size: int) -> "StreamLoader":
        """Return a loader of the same batches that gives rank `rank` its share of each."""
        mine = copy.copy(self)
        mine._under_way = []
        mine._set_rank(rank, world_size)
        mine._plan, mine._readers = mine._planned(mine.mixture)
        return mine

    @property
    def num_batches(self) -> int:
        """Batches of an epoch. In training the mixture does not change it."""
        return self._plan.num_batches

    def __len__(self) -> int:
        return self.num_batches

    # What is read.

    def choose(
        self,
        weights: Mapping[str, float] | None = None,
        sequence_length: int | None = None,
        only: Collection[str] | None = None,
        position: int | None = None,
    ) -> bool:
        """Change what is read; return whether anything changed.

        weights: proportions in training; streams left out are not read. Without, those the loader was made with.
        sequence_length: tokens of a sample, at most those of the data section; without, each stream's own.
        only: the streams that are read; the proportions among them stay.
        position: where an epoch under way goes on with it; without, it holds from the next `iterate` on.

        The order depends on what is chosen alone, not on what was before. Raises DataError for streams there are
        not, a length that does not fit, and if nothing would be left to train on; then nothing changes.
        """
        mixture = self._mixed(weights, sequence_length, only)
        if mixture == self.mixture:
            return False
        self._plan, self._readers = self._planned(mixture)
        self.mixture = mixture
        if position is not None:
            for batches, epoch in self._still_open():
                batches.go_on_as(self._open(epoch, position))
        return True

    def _still_open(self) -> list[tuple[EpochIterator, int]]:
        """Return the iterators that are not at their end: others than the training's may have come and gone since."""
        found = [(batches, epoch) for ref, epoch in self._under_way if (batches := ref()) is not None]
        return [(batches, epoch) for batches, epoch in found if not batches.is_closed]

    def _mixed(
        self, weights: Mapping[str, float] | None, sequence_length: int | None, only: Collection[str] | None
    ) -> Mixture:
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
            raise DataError(f"the streams to be read are {listed(only or ())}, but {why}; give one of them a weight")
        scaled = {name: weight / largest for name, weight in parts.items() if weight > 0}
        total = sum(scaled.values())
        shares = {name: weight / total for name, weight in scaled.items()}
        for name, share in shares.items():
            if share < SMALLEST_SHARE / 2:
                raise DataError(f"the weight {parts[name]} of stream '{name}' is too small beside {largest}")
        return Mixture(tuple(shares.items()), sequence_length)

    def _by_size(self, names: list[str]) -> dict[str, float]:
        total = sum(self._sizes[name] for name in names)
        return {name: max(self._sizes[name] / total, SMALLEST_SHARE) for name in names}

    def _planned(self, mixture: Mixture) -> tuple[Plan, dict[str, StreamReader]]:
        shares, size = dict(mixture.shares), self.batch_size
        streams = {name: self._stream(name, mixture.sequence_length) for name in shares}
        plan: Plan
        if not self.training:
            sizes = {name: stream.order(shuffle=self.shuffle).size for name, stream in streams.items()}
            plan = SequentialPlan(sizes, size)
        elif self.data.draw == "alternate":
            plan = AlternatingPlan(shares, size, self._training_batches, mix(self.seed, 11))
        else:
            plan = TogetherPlan(shares, size, self._training_batches)
        counts = plan.counts if isinstance(plan, TogetherPlan) else dict.fromkeys(shares, size)
        return plan, {
            name: StreamReader(
                stream, self._delivery, shuffle=self.shuffle, endless=self.training, batch_size=counts[name]
            )
            for name, stream in streams.items()
        }

    def _stream(self, name: str, sequence_length: int | None) -> Stream:
        if sequence_length is None:
            return self._streams[name]
        key = (name, sequence_length)
        if key not in self._cut:
            self._cut[key] = self._streams[name].with_length(sequence_length)
        return self._cut[key]

    # Batches.

    def iterate(self, epoch: int, position: int = 0) -> EpochIterator:
        """Return the batches of `epoch` from sample `position` on."""
        batches = self._open(epoch, position)
        kept = [(weakref.ref(one), its_epoch) for one, its_epoch in self._still_open()]
        self._under_way = [*kept, (weakref.ref(batches), epoch)]
        return batches

    def _open(self, epoch: int, position: int) -> EpochIterator:
        plan, readers = self._plan, self._readers
        if not 0 <= position <= plan.epoch_samples:
            raise DataError(
                f"cannot start at sample {position}: an epoch has {plan.epoch_samples} samples; "
                f"does the checkpoint belong to other data?"
            )
        items = self._items(plan, readers, epoch, position)
        threaded = all(reader.stream.threaded for reader in readers.values())
        return deliver(items, items, position, prefetch=self.prefetch, device=self.device, threaded=threaded)

    def _items(
        self, plan: Plan, readers: Mapping[str, StreamReader], epoch: int, position: int
    ) -> Iterator[tuple[int, Batch]]:
        """Each batch with the position behind it; what is chosen meanwhile changes neither plan nor readers."""
        joint = self.training and self.data.draw == "together"
        while position < plan.epoch_samples:
            spans = plan.spans(epoch, position)
            position += sum(span.stop - span.start for span in spans)
            parts = [readers[span.stream].read(epoch, span) for span in spans]
            yield position, JointBatch(parts) if joint else parts[0]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `for` begins."""
        self.epoch = epoch

    def __iter__(self) -> EpochIterator:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.iterate(epoch)
