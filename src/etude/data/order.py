"""Which samples make up a batch: arithmetic on (seed, epoch, position), the same for any number of ranks.

A shuffle is a keyed permutation: computed, not stored, so that any position of any epoch is reached at once.
"""

import itertools
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from etude.core.arguments import as_whole
from etude.core.errors import DataError
from etude.core.random import mix

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[Any]
"""Of uint32 or uint64."""
BLOCK = 4096
"""Positions computed together; a pure function of the key, so keeping the last block changes nothing."""
SORTED_LIMIT = 2**16
"""Up to this size a whole permutation is sorted at once: every order is equally likely, and it costs least."""
MAX_SIZE = 2**62
_ROUNDS = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SCRAMBLE_1 = np.uint64(0xBF58476D1CE4E5B9)
_SCRAMBLE_2 = np.uint64(0x94D049BB133111EB)
_SCRAMBLE_32 = 0x85EBCA6B


class Order(Protocol):
    """A sequence of sample indices for every epoch, reachable at any position."""

    @property
    def size(self) -> int:
        """Positions in one epoch."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the sample indices at positions start … stop-1 of `epoch`, as a new array."""
        ...


class SequentialOrder:
    """The samples as they come, the same every epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def indices(self, epoch: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """Return start … stop-1."""
        return np.arange(start, stop, dtype=np.int64)


class ShuffledOrder:
    """A new keyed permutation every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        # One tuple, replaced as a whole: threads never see a permutation under the wrong epoch.
        self._last: tuple[int, KeyedPermutation] | None = None

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the values of this epoch's permutation."""
        last = self._last
        if last is None or last[0] != epoch:
            self._last = last = (epoch, KeyedPermutation(self.size, mix(self.seed, epoch)))
        return last[1].indices(start, stop)


class BatchSampler:
    """Batches of sample indices, a new shuffle every epoch.

    `batch_size` is global. A position counts the samples of the epoch consumed over all ranks; the batch at a
    position covers `batch_size` samples from there on, and rank r takes the r-th of `world_size` even slices. So
    the ranks together see the same batches however many they are. A ragged last batch may be empty on some rank.

    It also serves as `batch_sampler` of a torch DataLoader, with `set_epoch` to change the shuffle.

    >>> sampler = BatchSampler(10, 4, shuffle=False)
    >>> list(sampler)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> [BatchSampler(10, 4, shuffle=False, rank=r, world_size=2).batch(0, 4).tolist() for r in (0, 1)]
    [[4, 5], [6, 7]]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        order: Order | None = None,
    ) -> None:
        """Set what every epoch has in common; an `order` given replaces the one that `shuffle` and `seed` make."""
        if order is not None:
            num_samples = order.size
        if num_samples < 1:
            raise DataError("the data is empty: there is no sample to make a batch of")
        batch_size = as_whole("batch_size", batch_size, least=1, error=DataError)
        if world_size < 1 or not 0 <= rank < world_size:
            raise DataError(f"rank {rank} of world_size {world_size}: rank must be in 0 … world_size-1")
        if drop_last and batch_size > num_samples:
            raise DataError(
                f"batch_size {batch_size} is larger than the {num_samples} samples, so drop_last leaves no batch; "
                f"lower batch_size to {num_samples} or less, or set drop_last to false"
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.epoch_samples = num_samples - num_samples % batch_size if drop_last else num_samples
        """Samples that one epoch hands out over all ranks."""
        self.num_batches = -(-self.epoch_samples // batch_size)
        if order is None:
            order = ShuffledOrder(num_samples, seed) if shuffle else SequentialOrder(num_samples)
        self.order: Order = order

    def batch(self, epoch: int, position: int) -> Indices:
        """Return this rank's indices of the batch that begins at `position`."""
        count = min(self.batch_size, self.epoch_samples - position)
        if position < 0 or count <= 0:
            raise DataError(
                f"position {position} is not within the {self.epoch_samples} samples of an epoch; "
                f"does the checkpoint belong to other data?"
            )
        start = position + count * self.rank // self.world_size
        stop = position + count * (self.rank + 1) // self.world_size
        return self.order.indices(epoch, start, stop)

    def chunks(self, epoch: int, position: int, count: int) -> Iterator[tuple[Indices, int]]:
        """Return this rank's indices from `position` on, up to `count` equal batches together, and how many they are.

        >>> sampler = BatchSampler(10, 4, shuffle=False)
        >>> [(indices.tolist(), number) for indices, number in sampler.chunks(0, 0, 2)]
        [([0, 1, 2, 3, 4, 5, 6, 7], 2), ([8, 9], 1)]
        """
        step = self.batch_size
        while self.has_batch(position):
            # A smaller last batch comes by itself. With several ranks the shares of batches do not adjoin.
            number = max(1, min(count, (self.epoch_samples - position) // step)) if self.world_size == 1 else 1
            if number == 1:
                yield self.batch(epoch, position), 1
                position = self.next_position(position)
            else:
                yield self.order.indices(epoch, position, position + number * step), number
                position += number * step

    def next_position(self, position: int) -> int:
        """Return the position after the batch that begins at `position`."""
        return min(position + self.batch_size, self.epoch_samples)

    def positions(self, position: int) -> Iterator[int]:
        """Return the position after each batch, from the one that begins at `position` on."""
        step, left = self.batch_size, self.epoch_samples - position
        number = left // step if self.drop_last else -(-left // step)
        if number <= 0:
            return iter(())
        last = position + number * step
        return chain(range(position + step, last, step), (min(last, self.epoch_samples),))

    def has_batch(self, position: int) -> bool:
        """Whether a batch begins at `position`; with `drop_last` only a full one counts."""
        return position + (self.batch_size if self.drop_last else 1) <= self.epoch_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that iteration runs over."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, position = self.epoch, 0
        while self.has_batch(position):
            yield self.batch(epoch, position).tolist()
            position = self.next_position(position)


class KeyedPermutation:
    """A shuffle of `range(size)` chosen by `key`: position i holds the value `perm[i]`.

    Small sizes sort a keyed hash of the positions. Larger ones pass through a Feistel network over the smallest
    rectangle a·b >= size; the few values that land outside are sent through again until they fall inside.

    >>> perm = KeyedPermutation(10, key=7)
    >>> sorted(perm.indices(0, 10).tolist()) == list(range(10))
    True
    >>> far = KeyedPermutation(10**15, key=7)
    >>> far[999_999_999_999] == int(far.indices(999_999_999_990, 10**12)[9])
    True
    """

    def __init__(self, size: int, key: int) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise ValueError(f"size is {size}; a permutation has 0 to 2**62 elements")
        self.size, self.key = size, key
        self._step = size if size <= SORTED_LIMIT else BLOCK
        # One tuple, replaced as a whole: readers in several threads never see a block under the wrong number.
        self._last: tuple[int, Indices] = (-1, np.empty(0, np.int64))
        # Halves of a value are kept in range(rows) and range(columns); rows·columns exceeds size by less than rows.
        rows = math.isqrt(max(size - 1, 0)) + 1
        # Sizes below 2**32 need only 32-bit words, of which a processor handles twice as many at once.
        word = self._word = np.uint32 if size < 2**32 else np.uint64
        keep = 2**32 - 1 if size < 2**32 else 2**64 - 1
        self._half_word = word(16 if size < 2**32 else 32)
        self._scramble = word(_SCRAMBLE_32 if size < 2**32 else int(_SCRAMBLE_1))
        self._rows, self._columns = word(rows), word(-(-size // rows))
        self._rounds = [(word(mix(key, r, 0) & keep | 1), word(mix(key, r, 1) & keep)) for r in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        return int(self.indices(position, position + 1)[0])

    def indices(self, start: int, stop: int) -> Indices:
        """Return the values at positions start … stop-1 as a new array.

        Raises IndexError if the positions are not within 0 … size.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"positions {start} to {stop} are not within 0 to {self.size}")
        if start == stop:
            return np.empty(0, np.int64)
        number = start // self._step
        first = number * self._step
        if stop <= first + self._step:
            return self._block(number)[start - first : stop - first].copy()
        edges = [start, *range(first + self._step, stop, self._step), stop]
        return np.concatenate([self.indices(a, b) for a, b in itertools.pairwise(edges)])

    def _block(self, number: int) -> Indices:
        last, values = self._last
        if last != number:
            if self.size <= SORTED_LIMIT:
                values = self._sorted()
            else:
                values = self._walk(number * BLOCK, min((number + 1) * BLOCK, self.size))
            self._last = (number, values)
        return values

    def _sorted(self) -> Indices:
        """The order of the positions' hashes; the hash is one-to-one, so there are no ties to break."""
        words = np.arange(self.size, dtype=np.uint64)
        words *= _GOLDEN
        words += np.uint64(mix(self.key))
        for shift, factor in ((30, _SCRAMBLE_1), (27, _SCRAMBLE_2)):
            words ^= words >> np.uint64(shift)
            words *= factor
        words ^= words >> np.uint64(31)
        return np.argsort(words)

    def _walk(self, start: int, stop: int) -> Indices:
        """Values of the network, with those outside range(size) sent through again (cycle walking)."""
        values = self._network(np.arange(start, stop, dtype=self._word))
        size = self._word(self.size)
        outside = np.flatnonzero(values >= size)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= size]
        return values.astype(np.int64)

    def _network(self, values: _Words) -> _Words:
        """One pass through the Feistel network: in turn each half is moved by a hash of the other half."""
        half_word, scramble = self._half_word, self._scramble
        left = values // self._columns
        right = values - left * self._columns
        hashed, spare = np.empty_like(values), np.empty_like(values)
        for number, (factor, offset) in enumerate(self._rounds):
            moved, fixed, extent = (left, right, self._rows) if number % 2 == 0 else (right, left, self._columns)
            np.multiply(fixed, factor, out=hashed)
            np.add(hashed, offset, out=hashed)
            np.right_shift(hashed, half_word, out=spare)
            np.bitwise_xor(hashed, spare, out=hashed)
            np.multiply(hashed, scramble, out=hashed)
            # The upper half of the bits, scaled to range(extent): extent fits into a half word, so the product fits.
            np.right_shift(hashed, half_word, out=hashed)
            np.multiply(hashed, extent, out=hashed)
            np.right_shift(hashed, half_word, out=hashed)
            # Addition modulo extent: the subtraction wraps to a huge number exactly when it must not be made.
            np.add(moved, hashed, out=moved)
            np.subtract(moved, extent, out=spare)
            np.minimum(moved, spare, out=moved)
        np.multiply(left, self._columns, out=left)
        np.add(left, right, out=left)
        return left
