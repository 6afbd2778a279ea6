"""Vectors: sections of a mapped token file, read by rows, spans or single values without loading all of it."""

import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.data.tokens.places import RemoteFile, exists, is_remote, local_path

Ints = NDArray[np.int64]
Array = NDArray[Any]

CHUNK_BYTES = 4 * 2**20
"""Chunk size for reading a whole file."""
AHEAD = 8
"""Pieces of a remote file that are then fetched together."""


class Vector:
    """Contiguous numbers of one dtype. Indices must be in range, except for `rows`."""

    def __init__(
        self,
        where: str,
        array: Array,
        mapping: mmap.mmap | None = None,
        need: Callable[[Ints, Ints], None] | None = None,
        offset: int = 0,
    ) -> None:
        """`need` ensures that the values in given ranges are available; `offset` is their byte offset in the file."""
        self._where, self._array, self._mapping, self._need = where, array, mapping, need
        self.count, self.dtype, self.offset = len(array), array.dtype, offset
        self._views: dict[int, Array] = {}

    def rows(self, starts: Ints, length: int) -> Array:
        """Return `length` values from each start, as a new (n, length) array; a start out of range is an error."""
        view = self._views.get(length)
        if view is None:
            check_rows(self._where, starts[:0], length, self.count)
            view = self._view(length)
        if starts.size and largest_unsigned(starts) >= len(view):
            check_rows(self._where, starts, length, self.count)
        if length:
            if self._need is not None and starts.size:
                self._need(starts, starts + length)
            # Touch the first value of each row: these page faults overlap, those of the copy would be sequential.
            self._array.take(starts)
        return view[starts].view(self.dtype).reshape(len(starts), length)

    def _view(self, length: int) -> Array:
        """Return an overlapping view in which row i begins at value i: one copy, no index arithmetic."""
        size, number = self.dtype.itemsize, max(self.count - length + 1, 0)
        if not length or not number:
            return np.empty((number, length), self.dtype)
        # A row is one opaque value, which NumPy copies as a whole.
        view: Array = np.ndarray(number, f"V{size * length}", self._array, strides=(size,))
        if len(self._views) < 64:  # limit the cache, so that many different lengths do not fill the memory
            self._views[length] = view
        return view

    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Return the concatenated spans, as a new array."""
        if self._need is not None and np.any(full := lengths > 0):
            self._need(starts[full], (starts + lengths)[full])
        # For spans of usual lengths, joining slices is faster than an array of positions.
        stops = (starts + lengths).tolist()
        parts = [self._array[start:stop] for start, stop in zip(starts.tolist(), stops, strict=True)]
        return np.concatenate(parts) if parts else self._array[:0].copy()

    def take(self, indices: Ints) -> Array:
        """Return single values."""
        if self._need is not None and indices.size:
            self._need(indices, indices + 1)
        values: Array = self._array[indices]
        return values

    def search(self, values: Ints) -> Ints:
        """Return for each value how many entries of this sorted vector are at most that value."""
        return np.searchsorted(self.slice(0, self.count), values, side="right")

    def slice(self, start: int, stop: int) -> Array:
        """Return a view of one span."""
        found = self._array[start:stop]
        if self._need is not None and len(found):
            self._need(np.array([start]), np.array([start + len(found)]))
        return found

    def chunks(self) -> Iterator[tuple[int, Array]]:
        """Yield (position, values) of the whole vector in chunks of a few megabytes, in constant memory."""
        size = CHUNK_BYTES // self.dtype.itemsize
        for start in range(0, self.count, size):
            if start % (AHEAD * size) == 0:
                self.slice(start, start + AHEAD * size)
            yield start, self.slice(start, start + size)
            self.forget()

    def forget(self) -> None:
        """Unmap all pages of the file; they stay in the page cache while there is memory."""
        if self._mapping is not None and sys.platform != "win32":
            self._mapping.madvise(mmap.MADV_DONTNEED)


class MappedFile:
    """A token file mapped into memory; for a remote one, the local copy that is filled as it is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._remote = RemoteFile(name) if is_remote(name) else None
        if self._remote is not None:
            self.size, self._mapping = self._remote.size, self._remote.mapping
            return
        path = local_path(name)
        if not exists(name):
            raise DataError(f"{name}: no such file, or not a file; `etude tokenize` makes token files")
        try:
            self.size = path.stat().st_size
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        except (OSError, ValueError) as error:
            raise DataError(f"{name} cannot be opened ({error})") from error

    def read(self, offset: int, size: int) -> bytes:
        """Return a few bytes; fewer than `size` at the end of the file."""
        found = self.vector(offset, max(0, min(size, self.size - offset)), "u1")
        return found.slice(0, size).tobytes()

    def vector(self, offset: int, count: int, dtype: str) -> Vector:
        """Return the `count` values from a byte offset inside the file."""
        kind = np.dtype(dtype).newbyteorder("<")
        if not count or self._mapping is None:
            return Vector(self.name, np.empty(0, kind))
        array = np.frombuffer(self._mapping, kind, count, offset)
        if (remote := self._remote) is None:
            return Vector(self.name, array, self._mapping, offset=offset)

        def need(starts: Ints, stops: Ints) -> None:
            remote.need(offset + starts * kind.itemsize, offset + stops * kind.itemsize)

        return Vector(self.name, array, self._mapping, need, offset)


def as_indices(values: Any) -> Ints:
    """Return integers as a one-dimensional int64 array."""
    array = np.asarray(values)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.dtype.kind not in "iu" and array.size:
        raise DataError(f"indices of samples and tokens must be integers, found {array.dtype}")
    return array.astype(np.int64).reshape(-1)


def largest_unsigned(values: Ints) -> int:
    """Return the largest value, counting negative ones as huge: one pass finds values outside 0 … n.

    >>> largest_unsigned(np.array([3, 7])), largest_unsigned(np.array([3, -1])) > 2**62
    (7, True)
    """
    return int(np.maximum.reduce(values.view(np.uint64))) if values.size else 0


def check_rows(where: str, starts: Ints, length: int, count: int) -> None:
    """Refuse rows outside 0 … count."""
    if length < 0 or (starts.size and (length > count or largest_unsigned(starts) > count - length)):
        low, high = (int(starts.min()), int(starts.max())) if starts.size else (0, 0)
        raise DataError(
            f"{where} has {count:,} tokens; rows of {length:,} from {low:,} … {high:,} are not within them"
        )
