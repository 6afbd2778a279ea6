"""Orders built from others: samples of similar length together, and several data sets in proportion."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order.permutation import Indices, KeyedPermutation, Order

POOL_BATCHES = 100
"""Batches sorted by length together: enough for little padding, few enough to stay random."""
CYCLE = 1024
"""Positions of a mixture in which every data set gets its share."""
MAX_DENOMINATOR = 10**6


class BucketOrder:
    """Another order, rearranged so that the samples of a batch have similar lengths and little padding is needed.

    The positions of the other order are grouped in pools of `pool_batches` batches. A pool is sorted by length and
    split into batches in a keyed order; within a batch the samples keep their original order. So every sample still
    occurs once per epoch, and the batch at a position depends only on its pool.

    >>> from etude.data.order.permutation import SequentialOrder
    >>> lengths = np.array([9, 1, 8, 2, 7, 3])
    >>> order = BucketOrder(SequentialOrder(6), lambda indices: lengths[indices], batch_size=2, pool_batches=3, seed=0)
    >>> sorted(lengths[order.indices(0, p, p + 2)].tolist() for p in (0, 2, 4))
    [[1, 2], [7, 3], [9, 8]]
    """

    def __init__(
        self,
        order: Order,
        lengths: Callable[[Indices], Indices],
        *,
        batch_size: int,
        pool_batches: int = POOL_BATCHES,
        seed: int = 0,
    ) -> None:
        if pool_batches < 1:
            raise DataError(f"a pool of {pool_batches} batches cannot be sorted by length; it must have at least 1")
        self.order, self.lengths, self.batch_size, self.seed = order, lengths, batch_size, seed
        self.pool_size = batch_size * pool_batches
        self.size = order.size
        self._last: tuple[tuple[int, int], Indices] | None = None

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the sample indices at positions start … stop-1."""
        return _paged(start, stop, self.pool_size, lambda number: self._pool(epoch, number))

    def _pool(self, epoch: int, number: int) -> Indices:
        last = self._last
        if last is None or last[0] != (epoch, number):
            self._last = last = ((epoch, number), self._arranged(epoch, number))
        return last[1]

    def _arranged(self, epoch: int, number: int) -> Indices:
        start = number * self.pool_size
        members = self.order.indices(epoch, start, min(start + self.pool_size, self.size))
        places = np.argsort(self.lengths(members), kind="stable")
        num_full, rest = divmod(len(members), self.batch_size)
        key = mix(self.seed, epoch, number)
        # Only the last batch of an epoch may be smaller. Its lengths are random.
        cut = (mix(key, 1) % (num_full + 1)) * self.batch_size
        last = np.sort(places[cut : cut + rest])
        full = np.concatenate([places[:cut], places[cut + rest :]]).reshape(num_full, self.batch_size)
        full = np.sort(full[KeyedPermutation(num_full, key).indices(0, num_full)], axis=1)
        arranged: Indices = members[np.concatenate([full.ravel(), last])]
        return arranged


class MixtureOrder:
    """Several data sets in given proportions, each reshuffled after every pass.

    Indices are consecutive: those of the second data set follow those of the first. After n draws from the start of
    the run a data set of weight w has been drawn w·n times, to within one at the end of every cycle and to within the
    number of data sets at any time; proportions never drift. A data set smaller than its share starts again, a larger
    one continues in the next epoch.

    >>> order = MixtureOrder([1000, 10], [3, 1], size=400)
    >>> drawn = order.indices(0, 0, 400)
    >>> abs(int((drawn < 1000).sum()) - 300) <= 2
    True
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int = 0,
        size: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if len(sizes) != len(weights) or not sizes:
            raise DataError(f"{len(sizes)} data sets and {len(weights)} weights; pass one weight per data set")
        if not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise DataError(f"the weights {list(weights)} of a mixture must be positive; remove the others")
        if min(sizes) < 1:
            raise DataError("a data set of the mixture is empty; remove it")
        self.sizes, self.seed, self.shuffle = tuple(sizes), seed, shuffle
        self.size = size if size is not None else sum(sizes)
        exact = [Fraction(weight).limit_denominator(MAX_DENOMINATOR) for weight in weights]
        if min(exact) == 0:
            raise DataError(f"the weights {list(weights)} differ too much: the smallest is below 1/{MAX_DENOMINATOR}")
        self._until = [bound / sum(exact) for bound in accumulate(exact)]
        # Long enough that every data set is drawn at least once per cycle, so that no count decreases.
        self._cycle = max(CYCLE, -(-sum(exact) // min(exact)))
        self._offsets = [0, *accumulate(sizes)]
        self._last: tuple[int, Indices] | None = None
        self._passes: dict[int, tuple[int, KeyedPermutation]] = {}

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the sample indices at positions start … stop-1."""
        before = epoch * self.size
        return _paged(before + start, before + stop, self._cycle, self._dealt)

    def drawn(self, draws: int) -> list[int]:
        """Return how often each data set has been drawn after `draws` draws, a multiple of full cycles."""
        bounds = [int(until * draws) for until in self._until]
        return [high - low for low, high in zip([0, *bounds], bounds, strict=False)]

    def _dealt(self, number: int) -> Indices:
        last = self._last
        if last is None or last[0] != number:
            self._last = last = (number, self._deal(number))
        return last[1]

    def _deal(self, number: int) -> Indices:
        """The draws of one cycle: every data set continues where it stopped, and its draws are spread evenly."""
        before, after = self.drawn(number * self._cycle), self.drawn((number + 1) * self._cycle)
        draws = [self._draws(which, *span) for which, span in enumerate(zip(before, after, strict=True))]
        # The k-th of n draws is at a random time between k/n and (k+1)/n.
        chance = (np.random.Philox(key=mix(self.seed, number)).random_raw(self._cycle) >> np.uint64(11)) * 2.0**-53
        ranks = np.concatenate([np.arange(len(part)) for part in draws])
        counts = np.repeat([len(part) for part in draws], [len(part) for part in draws])
        return np.concatenate(draws)[np.argsort((ranks + chance) / counts, kind="stable")]

    def _draws(self, which: int, start: int, stop: int) -> Indices:
        """Draws start … stop-1 of one data set, over several passes."""
        size, offset = self.sizes[which], self._offsets[which]
        parts = []
        while start < stop:
            turn, place = divmod(start, size)
            until = min(stop, (turn + 1) * size)
            if self.shuffle:
                parts.append(self._pass(which, turn).indices(place, until - turn * size) + offset)
            else:
                parts.append(np.arange(place, until - turn * size, dtype=np.int64) + offset)
            start = until
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _pass(self, which: int, turn: int) -> KeyedPermutation:
        kept = self._passes.get(which)
        if kept is None or kept[0] != turn:
            kept = (turn, KeyedPermutation(self.sizes[which], mix(self.seed, which, turn)))
            self._passes[which] = kept
        return kept[1]


def _paged(start: int, stop: int, page: int, read: Callable[[int], Indices]) -> Indices:
    """Return positions start … stop-1 of a sequence that `read` returns in pages, as a new array."""
    if start == stop:
        return np.empty(0, np.int64)
    pages = range(start // page, (stop - 1) // page + 1)
    parts = [read(number)[max(start - number * page, 0) : stop - number * page] for number in pages]
    return np.concatenate(parts)
