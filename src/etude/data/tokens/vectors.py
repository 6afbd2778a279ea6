"""Vectors: one-dimensional stretches of a file, read by rows, spans or single values without holding the whole."""

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from etude.core.errors import DataError

Ints = NDArray[np.int64]
Array = NDArray[Any]
Prepare = Callable[[Ints, Ints | int], None]
"""Makes the bytes of a remote file present: offsets, and how many bytes from each."""

CHUNK_BYTES = 4 * 2**20
"""How much of a file is looked at in one piece where all of it is read."""

_AHEAD = 16  # chunks of a remote file that are fetched together
_STRETCH = 512  # values of a sorted vector that are read together
_PIECE = 2**30  # Linux reads at most 2 GiB at once


class Vector(Protocol):
    """Numbers of one type that lie one after the other. Indices given to it are in range, but for `rows`."""

    count: int
    dtype: np.dtype[Any]

    def rows(self, starts: Ints, length: int) -> Array:
        """Return `length` values from each start, as a fresh (n, length) array; a start out of range is an error."""

    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Return the spans one after the other, as a fresh array."""

    def take(self, indices: Ints) -> Array:
        """Return single values."""

    def pairs(self, indices: Ints) -> tuple[Array, Array]:
        """Return the values at these indices, and those after them."""
        rows = self.rows(indices, 2)
        return rows[:, 0], rows[:, 1]

    def search(self, values: Ints) -> Ints:
        """Return for each value how many entries of this sorted vector are not above it, by reading a few of them."""
        return search(self.take, self.count, values)

    def slice(self, start: int, stop: int) -> Array:
        """Return the values of one span; not to be written to."""

    def prepare(self, start: int, stop: int) -> None:
        """Fetch a span of a remote file in few requests, before it is read piece by piece."""

    def forget(self, start: int, stop: int) -> None:
        """Let go of the memory that reading this span has made resident."""


def chunks(vector: Vector, *, size: int = 0) -> Iterator[tuple[int, Array]]:
    """Yield (position, values) of a whole vector, `size` values or a few megabytes at a time, in constant memory."""
    size = size or CHUNK_BYTES // vector.dtype.itemsize
    for number, start in enumerate(range(0, vector.count, size)):
        if number % _AHEAD == 0:
            vector.prepare(start, min(start + _AHEAD * size, vector.count))
        stop = min(start + size, vector.count)
        yield start, vector.slice(start, stop)
        vector.forget(start, stop)


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
        self._where = where
        self._array = array
        self.count, self.dtype = len(array), array.dtype
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

    def prepare(self, start: int, stop: int) -> None:
        """Nothing to fetch."""

    def forget(self, start: int, stop: int) -> None:
        """Nothing to let go of."""


class MappedVector(ArrayVector):
    """A stretch of a memory-mapped file."""

    def __init__(self, where: str, mapping: mmap.mmap, offset: int, count: int, dtype: np.dtype[Any]) -> None:
        array = np.frombuffer(mapping, dtype, count, offset) if count else np.empty(0, dtype)
        super().__init__(where, array)
        self._mapping, self._offset = mapping, offset

    def forget(self, start: int, stop: int) -> None:
        """Unmap the pages behind a sequential reader; they stay in the page cache as long as there is room."""
        if sys.platform != "win32" and stop > start:
            size = self.dtype.itemsize
            first = (self._offset + start * size) // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_DONTNEED, first, self._offset + stop * size - first)


class PreadVector(Vector):
    """A stretch of an open file, read by system calls: nothing is mapped, nothing stays in memory."""

    def __init__(self, where: str, descriptor: int, offset: int, count: int, dtype: np.dtype[Any]) -> None:
        self._where, self._descriptor, self._offset = where, descriptor, offset
        self.count, self.dtype = count, dtype
        self._signposts: Array | None = None

    def rows(self, starts: Ints, length: int) -> Array:
        """Read each row into its place."""
        check_rows(self._where, starts, length, self.count)
        out = np.empty((len(starts), length), self.dtype)
        self._fill(out, starts, np.full(len(starts), length, np.int64))
        return out

    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Read each span into its place."""
        out = np.empty(int(lengths.sum()), self.dtype)
        self._fill(out, starts, lengths)
        return out

    def take(self, indices: Ints) -> Array:
        """Read single values."""
        out = np.empty(len(indices), self.dtype)
        self._fill(out, indices, np.ones(len(indices), np.int64))
        return out

    def search(self, values: Ints) -> Ints:
        """Find the stretch by every 512th value, which are kept, and read one stretch for each value."""
        length = min(_STRETCH, self.count)
        if self._signposts is None:
            self._signposts = self.take(np.arange(0, self.count, _STRETCH))
        starts = (np.searchsorted(self._signposts, values, side="right") - 1) * _STRETCH
        starts = np.clip(starts, 0, self.count - length)
        found: Ints = starts + np.count_nonzero(self.rows(starts, length) <= values[:, None], axis=1)
        return found

    def slice(self, start: int, stop: int) -> Array:
        """Read one span."""
        return self.spans(np.array([start]), np.array([stop - start]))

    def prepare(self, start: int, stop: int) -> None:
        """Nothing to fetch."""

    def forget(self, start: int, stop: int) -> None:
        """Nothing is held."""

    def _fill(self, out: Array, starts: Ints, lengths: Ints) -> None:
        if not out.size:
            return
        place, target, size = 0, out.reshape(-1).view(np.uint8).data, self.dtype.itemsize
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            offset, end = self._offset + start * size, place + length * size
            while place < end:
                got = read_into(self._where, self._descriptor, target[place : min(end, place + _PIECE)], offset)
                place, offset = place + got, offset + got


def read_into(where: str, descriptor: int, target: memoryview, offset: int) -> int:
    """Read some bytes at an offset; raises DataError if there are none."""
    try:
        if sys.platform == "win32":
            raise DataError(f"{where} cannot be mapped into memory, and Windows has no other way to read it in parts")
        got = os.preadv(descriptor, [target], offset)
    except OSError as error:
        raise DataError(f"{where} cannot be read ({error.strerror})") from error
    if not got:
        raise DataError(f"{where} ends at byte {offset:,}: it was cut while it was being read; make it again")
    return got


class FetchedVector(Vector):
    """A stretch of a remote file's local copy; what is missing there is fetched before it is read."""

    def __init__(self, where: str, inner: Vector, prepare: Prepare, offset: int) -> None:
        self._where, self._inner, self._prepare, self._offset = where, inner, prepare, offset
        self.count, self.dtype = inner.count, inner.dtype

    def rows(self, starts: Ints, length: int) -> Array:
        """Fetch, then read."""
        check_rows(self._where, starts, length, self.count)
        self._fetch(starts, length)
        return self._inner.rows(starts, length)

    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Fetch, then read."""
        self._fetch(starts, lengths)
        return self._inner.spans(starts, lengths)

    def take(self, indices: Ints) -> Array:
        """Fetch, then read."""
        self._fetch(indices, 1)
        return self._inner.take(indices)

    def slice(self, start: int, stop: int) -> Array:
        """Fetch, then read."""
        self.prepare(start, stop)
        return self._inner.slice(start, stop)

    def prepare(self, start: int, stop: int) -> None:
        """Fetch what is missing, in as few requests as can be."""
        self._fetch(np.array([start]), stop - start)

    def forget(self, start: int, stop: int) -> None:
        """Let go of memory; the local copy stays."""
        self._inner.forget(start, stop)

    def _fetch(self, starts: Ints, length: Ints | int) -> None:
        self._prepare(self._offset + starts * self.dtype.itemsize, length * self.dtype.itemsize)


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
