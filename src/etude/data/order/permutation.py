"""The sample at a position, as a function of (seed, epoch, position).

A shuffle is a keyed permutation: computed, not stored, so that any position of any epoch is available in constant
time.
"""

import itertools
import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from etude.core.random import mix

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[Any]
"""An array of uint32 or uint64."""
BLOCK = 4096
"""Positions computed together; the last block is cached, as it is a pure function of the key."""
SORTED_LIMIT = 2**16
"""Up to this size a whole permutation is computed by sorting: cheapest, and uniform over all permutations."""
MAX_SIZE = 2**62
_ROUNDS = 4
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SCRAMBLE_1 = np.uint64(0xBF58476D1CE4E5B9)
_SCRAMBLE_2 = np.uint64(0x94D049BB133111EB)
_SCRAMBLE_32 = 0x85EBCA6B


def scramble(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of 64-bit numbers in place: the finalizer of SplitMix64, which is one-to-one."""
    spare = np.empty_like(words)  # a new array in each line would take longer to allocate than to compute
    for shift, factor in ((30, _SCRAMBLE_1), (27, _SCRAMBLE_2)):
        words ^= np.right_shift(words, np.uint64(shift), out=spare)
        words *= factor
    words ^= np.right_shift(words, np.uint64(31), out=spare)
    return words


class Order(Protocol):
    """A sequence of sample indices for every epoch, with random access."""

    @property
    def size(self) -> int:
        """Positions in one epoch."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the sample indices at positions start … stop-1 of `epoch`, as a new array."""
        ...


class SequentialOrder:
    """The samples in order, the same in every epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def indices(self, epoch: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """Return start … stop-1."""
        return np.arange(start, stop, dtype=np.int64)


class ShuffledOrder:
    """A new keyed permutation for every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        # One tuple, replaced as a whole: threads never see a permutation of another epoch.
        self._last: tuple[int, KeyedPermutation] | None = None

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the values of this epoch's permutation."""
        last = self._last
        if last is None or last[0] != epoch:
            self._last = last = (epoch, KeyedPermutation(self.size, mix(self.seed, epoch)))
        return last[1].indices(start, stop)


class KeyedPermutation:
    """A shuffle of `range(size)` determined by `key`: position i holds the value `perm[i]`.

    Small sizes sort a keyed hash of the positions. Larger ones use a Feistel network over the smallest rectangle a·b
    >= size; the few values outside are passed through again until they are inside.

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
        # One tuple, replaced as a whole: threads never see a block under the wrong number.
        self._last: tuple[int, Indices] = (-1, np.empty(0, np.int64))
        # The halves of a value are in range(rows) and range(columns); rows·columns exceeds size by less than rows.
        rows = math.isqrt(max(size - 1, 0)) + 1
        # Sizes below 2**32 need only 32-bit words, which a processor handles twice as fast.
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
        """The order of the positions' hashes; the hash is one-to-one, so there are no ties."""
        words = np.arange(self.size, dtype=np.uint64)
        words *= GOLDEN
        words += np.uint64(mix(self.key))
        return np.argsort(scramble(words))

    def _walk(self, start: int, stop: int) -> Indices:
        """Values of the network; those outside range(size) are passed through again (cycle walking)."""
        values = self._network(np.arange(start, stop, dtype=self._word))
        size = self._word(self.size)
        outside = np.flatnonzero(values >= size)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= size]
        return values.astype(np.int64)

    def _network(self, values: _Words) -> _Words:
        """One pass through the Feistel network: each half in turn is shifted by a hash of the other half."""
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
            # Addition modulo extent: the subtraction wraps to a huge number exactly if it must not be applied.
            np.add(moved, hashed, out=moved)
            np.subtract(moved, extent, out=spare)
            np.minimum(moved, spare, out=moved)
        np.multiply(left, self._columns, out=left)
        np.add(left, right, out=left)
        return left
