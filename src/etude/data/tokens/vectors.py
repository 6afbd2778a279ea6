"""Vectors: one-dimensional stretches of a file, read by rows, spans or single values without holding the whole."""

import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from etude.core.errors import DataError

Ints = NDArray[np.int64]
Array = NDArray[Any]

CHUNK_BYTES = 4 * 2**20
"""How much of a file is looked at in one piece where all of it is read."""

_AHEAD = 16  # chunks of a remote file that are fetched together


class Vector(ABC):
    """Numbers of one type that lie one after the other. Indices given to it are in range, but for `rows`."""

    def __init__(self, where: str, count: int, dtype: np.dtype[Any]) -> None:
        self._where, self.count, self.dtype = where, count, dtype

    @abstractmethod
    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Return the spans one after the other, as a fresh array."""

    def rows(self, starts: Ints, length: int) -> Array:
        """Return `length` values from each start, as a fresh (n, length) array; a start out of range is an error."""
        check_rows(self._where, starts, length, self.count)
        return self.spans(starts, np.full(len(starts), length, np.int64)).reshape(len(starts), length)

    def take(self, indices: Ints) -> Array:
        """Return single values."""
        return self.spans(indices, np.ones(len(indices), np.int64))

    def slice(self, start: int, stop: int) -> Array:
        """Return the values of one span; not to be written to."""
        return self.spans(np.array([start]), np.array([stop - start]))

    def pairs(self, indices: Ints) -> tuple[Array, Array]:
        """Return the values at these indices, and those after them."""
        rows = self.rows(indices, 2)
        return rows[:, 0], rows[:, 1]

    def search(self, values: Ints) -> Ints:
        """Return for each value how many entries of this sorted vector are not above it, by reading a few of them."""
        return search(self.take, self.count, values)

    def prepare(self, start: int, stop: int) -> None:  # noqa: B027 -- nothing has to be fetched from this machine
        """Fetch a span of a remote file in few requests, before it is read piece by piece."""

    def forget(self) -> None:  # noqa: B027 -- nothing is held
        """Let go of the memory that reading in order has made resident."""


def chunks(vector: Vector, *, size: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield (position, values) of a whole vector, `size` values or a few megabytes at a time, in constant memory."""
    size = size or CHUNK_BYTES // vector.dtype.itemsize
    for number, start in enumerate(range(0, vector.count, size)):
        if number % _AHEAD == 0:
            vector.prepare(start, min(start + _AHEAD * size, vector.count))
        yield start, vector.slice(start, min(start + size, vector.count))
        vector.forget()


def as_indices(values: Any) -> Ints:
    """Return whole numbers as a one-dimensional int64 array."""
    array = np.asarray(values)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.dtype.kind not in "iu" and array.size:
        raise DataError(f"indices of samples and tokens are whole numbers, found {array.dtype}")
    return array.astype(np.int64).reshape(-1)


def largest_unsigned(values: Ints) -> int:
    """Return the largest value, negative ones counted as huge: one pass finds what lies outside 0 … n.

    >>> largest_unsigned(np.array([3, 7])), largest_unsigned(np.array([3, -1])) > 2**62
    (7, True)
    """
    return int(np.maximum.reduce(values.view(np.uint64))) if values.size else 0


def check_rows(where: str, starts: Ints, length: int, count: int) -> None:
    """Refuse rows that do not lie within 0 … count."""
    if length < 0 or (starts.size and (length > count or largest_unsigned(starts) > count - length)):
        low, high = (int(starts.min()), int(starts.max())) if starts.size else (0, 0)
        raise DataError(
            f"{where} has {count:,} tokens; rows of {length:,} from {low:,} … {high:,} do not lie within them"
        )


class ArrayVector(Vector):
    """A vector that lies in memory or is mapped into it."""

    def __init__(self, where: str, array: Array) -> None:
        super().__init__(where, len(array), array.dtype)
        self._array = array
        self._views: dict[int, Array] = {}
        # Values that are not aligned (Megatron's index) are gathered as bytes: numpy would copy the whole array first.
        self._bytes = None if array.flags.aligned else _rows_of_bytes(array)

    def rows(self, starts: Ints, length: int) -> Array:
        """Gather from an overlapping view, in which row i begins at value i: one copy, no index arithmetic."""
        view = self._views.get(length)
        if view is None:
            check_rows(self._where, starts[:0], length, self.count)
            view = self._view(length)
        if starts.size and largest_unsigned(starts) >= len(view):
            check_rows(self._where, starts, length, self.count)
        if self._bytes is None and length:
            # Touch the first value of each row: these misses overlap, those of the copy would come one by one.
            self._array.take(starts)
        return view[starts].view(self.dtype).reshape(len(starts), length)

    def _view(self, length: int) -> Array:
        size, number = self.dtype.itemsize, max(self.count - length + 1, 0)
        if not length or not number:
            return np.empty((number, length), self.dtype)
        # A row is one opaque value, which numpy copies as a whole and not number by number.
        view: Array = np.ndarray(number, f"V{size * length}", self._array, strides=(size,))
        if len(self._views) < 64:  # a program that asks for every length there is does not fill the memory
            self._views[length] = view
        return view

    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Concatenate slices: for spans of usual lengths faster than an array of positions."""
        array = self._array
        if not starts.size:
            return array[:0].copy()
        stops = (starts + lengths).tolist()
        return np.concatenate([array[start:stop] for start, stop in zip(starts.tolist(), stops, strict=True)])

    def take(self, indices: Ints) -> Array:
        """Return single values."""
        if self._bytes is not None:
            return self._bytes[indices].view(self.dtype).reshape(-1)
        values: Array = self._array.take(indices)
        return values

    def pairs(self, indices: Ints) -> tuple[Array, Array]:
        """Look up twice: from memory faster than rows of two."""
        return self.take(indices), self.take(indices + 1)

    def search(self, values: Ints) -> Ints:
        """Search in place; numpy would copy values that are not aligned."""
        if self._bytes is not None or self.dtype != values.dtype:
            return super().search(values)
        return np.searchsorted(self._array, values, side="right")

    def slice(self, start: int, stop: int) -> Array:
        """Return a view."""
        return self._array[start:stop]


class MappedVector(ArrayVector):
    """A stretch of a memory-mapped file."""

    def __init__(self, where: str, mapping: mmap.mmap, offset: int, count: int, dtype: np.dtype[Any]) -> None:
        array = np.frombuffer(mapping, dtype, count, offset) if count else np.empty(0, dtype)
        super().__init__(where, array)
        self._mapping = mapping

    def forget(self) -> None:
        """Unmap all pages of the file; they stay in the page cache as long as there is room."""
        if sys.platform != "win32":
            self._mapping.madvise(mmap.MADV_DONTNEED)


def search(take: Callable[[Ints], Array], count: int, values: Ints) -> Ints:
    """Return for each value how many of `count` sorted entries are not above it; `take` looks entries up.

    >>> search(np.array([0, 3, 3, 7]).take, 4, np.array([0, 2, 3, 9])).tolist()
    [1, 1, 3, 4]
    """
    low, high = np.zeros(len(values), np.int64), np.full(len(values), count, np.int64)
    while bool(np.any(searching := low < high)):
        middle = (low + high) // 2
        above = take(np.minimum(middle, count - 1)) > values
        high = np.where(searching & above, middle, high)
        low = np.where(searching & ~above, middle + 1, low)
    return low


def _rows_of_bytes(array: Array) -> Array:
    size = array.dtype.itemsize
    return as_strided(array.view(np.uint8), (len(array), size), (size, 1), writeable=False)
