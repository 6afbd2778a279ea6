"""Which samples of which stream make up a batch: a function of (epoch, position) and the mixture."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from etude.core.errors import DataError
from etude.data.order.mixed import MixtureOrder
from etude.data.order.permutation import Indices, Order

ENDLESS = 2**62
SMALLEST_SHARE = 2e-6
"""The smallest share of a stream: counts are exact fractions, whose denominators stay small."""
_ROOM = 2**40
"""Maximum number of batches of a stream; more than any run has."""


def stable_number(name: str) -> int:
    """Return a number for a name, the same in every process.

    >>> stable_number("code") == stable_number("code") != stable_number("text")
    True
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


class EndlessOrder:
    """Another order repeated without end: position p is position p % size of its epoch p // size.

    >>> from etude.data.order.permutation import SequentialOrder
    >>> EndlessOrder(SequentialOrder(3)).indices(0, 1, 8).tolist()
    [1, 2, 0, 1, 2, 0, 1]
    """

    size = ENDLESS

    def __init__(self, order: Order) -> None:
        self.order = order

    def indices(self, epoch: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """Return the sample indices at positions start … stop-1."""
        size = self.order.size
        turn, place = divmod(start, size)
        if start < stop <= (turn + 1) * size:
            return self.order.indices(turn, place, place + stop - start)
        parts = [np.empty(0, np.int64)]
        while start < stop:
            turn, place = divmod(start, size)
            until = min(size, place + stop - start)
            parts.append(self.order.indices(turn, place, until))
            start += until - place
        return np.concatenate(parts)


class Span(NamedTuple):
    """Positions start … stop-1 of a stream's own order."""

    stream: str
    start: int
    stop: int


class StreamPlan(ABC):
    """The batches of an epoch, as spans of streams."""

    def __init__(self, counts: Mapping[str, int], batch_size: int, num_batches: int, epoch_samples: int) -> None:
        self.counts = counts
        """Samples of each stream in a batch that contains it."""
        self.batch_size, self.num_batches, self.epoch_samples = batch_size, num_batches, epoch_samples

    @abstractmethod
    def spans(self, epoch: int, position: int) -> list[Span]:
        """Return the spans of the batch at sample `position`; inside a batch, the rest of it."""


class AlternatingPlan(StreamPlan):
    """Every batch has one stream; after n batches a stream of share w has had w·n of them, to within one or two.

    Streams are ordered by name, so their order in a config file does not matter.
    """

    def __init__(self, shares: Mapping[str, float], batch_size: int, num_batches: int, seed: int) -> None:
        super().__init__(dict.fromkeys(shares, batch_size), batch_size, num_batches, batch_size * num_batches)
        self.names = sorted(shares)
        # Treated as data sets longer than any run, in order: a draw gives the stream and its count so far.
        sizes = [_ROOM] * len(self.names)
        self._order = MixtureOrder(sizes, [shares[name] for name in self.names], seed=seed, shuffle=False)

    def spans(self, epoch: int, position: int) -> list[Span]:
        """Return the one span of the batch."""
        number, skipped = divmod(position, self.batch_size)
        number += epoch * self.num_batches
        which, turn = divmod(int(self._order.indices(0, number, number + 1)[0]), _ROOM)
        start = turn * self.batch_size
        return [Span(self.names[which], start + skipped, start + self.batch_size)]


class TogetherPlan(StreamPlan):
    """Every batch has the same share of each stream."""

    def __init__(self, shares: Mapping[str, float], batch_size: int, num_batches: int) -> None:
        counts = dict(zip(shares, apportioned(list(shares.values()), batch_size), strict=True))
        super().__init__(counts, batch_size, num_batches, batch_size * num_batches)

    def spans(self, epoch: int, position: int) -> list[Span]:
        """Return one span per stream."""
        number, skipped = divmod(position, self.batch_size)
        number += epoch * self.num_batches
        spans = []
        for name, count in self.counts.items():
            left_out = min(skipped, count)
            skipped -= left_out
            spans.append(Span(name, number * count + left_out, (number + 1) * count))
        return spans


class SequentialPlan(StreamPlan):
    """Every stream once, one after the other; the last batch of each may be smaller."""

    def __init__(self, sizes: Mapping[str, int], batch_size: int) -> None:
        self.sizes = dict(sizes)
        num_batches = sum(-(-size // batch_size) for size in sizes.values())
        super().__init__(dict.fromkeys(sizes, batch_size), batch_size, num_batches, sum(sizes.values()))

    def spans(self, epoch: int, position: int) -> list[Span]:  # noqa: ARG002
        """Return the one span of the batch."""
        for name, size in self.sizes.items():
            if position < size:
                return [Span(name, position, min(position + self.batch_size, size))]
            position -= size
        raise AssertionError("there is no batch after the last stream")


def apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Return positive integers that sum to `total`, as close to the shares as possible.

    >>> apportioned([0.5, 0.3, 0.2], 8), apportioned([0.97, 0.02, 0.01], 10)
    ([4, 2, 2], [8, 1, 1])
    """
    if total < len(shares):
        raise DataError(
            f"batch_size is {total}, but every batch has samples of each of {len(shares)} streams; increase "
            "batch_size or set draw to alternate"
        )
    wanted = [share / sum(shares) * total for share in shares]
    counts = [max(1, int(value)) for value in wanted]
    while (missing := total - sum(counts)) != 0:
        gaps = [value - count for value, count in zip(wanted, counts, strict=True)]
        if missing > 0:
            counts[gaps.index(max(gaps))] += 1
        else:
            counts[min((i for i, count in enumerate(counts) if count > 1), key=gaps.__getitem__)] -= 1
    return counts
