"""Opening the bytes of a token file: mapped into memory, or read by system calls where there is no room for that."""

import errno
import math
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.vectors import Array, Ints, MappedVector, Vector

Prepare = Callable[[Ints, Ints | int], None]
"""Makes the bytes of a remote file present: offsets, and how many bytes from each."""

_STRETCH = 512  # values of a sorted vector that are read together
_PIECE = 2**30  # Linux reads at most 2 GiB at once


class Storage:
    """An open file of a known size. `name` is what the user called it, in messages.

    With `prepare`, which fetches what is about to be read, nothing is mapped.
    """

    def __init__(self, path: Path, *, name: str, memory_map: bool = True, prepare: Prepare | None = None) -> None:
        self.name, self.prepare = name, prepare
        descriptor = _open(path, name)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size
        mapped = memory_map and prepare is None and 0 < self.size <= mapping_limit()
        self._mapping = _map(descriptor, name) if mapped else None
        if self._mapping is not None:
            self._close()  # the mapping holds the file open by itself

    def read(self, offset: int, size: int) -> bytes:
        """Return a few bytes; fewer than `size` where the file ends."""
        size = max(min(size, self.size - offset), 0)
        if self._mapping is not None:
            return self._mapping[offset : offset + size]
        if self.prepare is not None:
            self.prepare(np.array([offset]), size)
        buffer = bytearray(size)
        self.fill(memoryview(buffer), offset)
        return bytes(buffer)

    def fill(self, target: memoryview, offset: int) -> None:
        """Read the bytes from an offset by system calls; raises DataError if the file ends before."""
        while target:
            try:
                if sys.platform == "win32":
                    raise DataError(f"{self.name} cannot be mapped, and Windows has no other way to read it in parts")
                got = os.preadv(self._descriptor, [target[:_PIECE]], offset)
            except OSError as error:
                raise DataError(f"{self.name} cannot be read ({error.strerror})") from error
            if not got:
                raise DataError(
                    f"{self.name} ends at byte {offset:,}: it was cut while it was being read; make it again"
                )
            target, offset = target[got:], offset + got

    def vector(self, offset: int, count: int, dtype: np.dtype[Any] | str) -> Vector:
        """Return the `count` values from a byte offset, which lie inside the file."""
        dtype = np.dtype(dtype).newbyteorder("<")
        assert 0 <= offset <= offset + count * dtype.itemsize <= self.size
        if self._mapping is not None:
            return MappedVector(self.name, self._mapping, offset, count, dtype)
        return PreadVector(self, offset, count, dtype)


class PreadVector(Vector):
    """A stretch of an open file, read by system calls: nothing is mapped, nothing stays in memory."""

    def __init__(self, storage: Storage, offset: int, count: int, dtype: np.dtype[Any]) -> None:
        super().__init__(storage.name, count, dtype)
        self._storage, self._offset = storage, offset
        self._signposts: Array | None = None

    def spans(self, starts: Ints, lengths: Ints) -> Array:
        """Read each span into its place."""
        out = np.empty(int(lengths.sum()), self.dtype)
        if out.size:
            target, size = out.view(np.uint8).data, self.dtype.itemsize
            self._fetch(starts, lengths)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self._storage.fill(target[: length * size], self._offset + start * size)
                target = target[length * size :]
        return out

    def search(self, values: Ints) -> Ints:
        """Find the stretch by every 512th value, which are kept, and read one stretch for each value."""
        if self._storage.prepare is not None:
            return super().search(values)  # all of these values together would be the whole vector
        length = min(_STRETCH, self.count)
        if self._signposts is None:
            self._signposts = self.take(np.arange(0, self.count, _STRETCH))
        starts = (np.searchsorted(self._signposts, values, side="right") - 1) * _STRETCH
        starts = np.clip(starts, 0, self.count - length)
        found: Ints = starts + np.count_nonzero(self.rows(starts, length) <= values[:, None], axis=1)
        return found

    def prepare(self, start: int, stop: int) -> None:
        """Fetch what is missing, in as few requests as can be."""
        self._fetch(np.array([start]), stop - start)

    def _fetch(self, starts: Ints, lengths: Ints | int) -> None:
        if self._storage.prepare is not None:
            size = self.dtype.itemsize
            self._storage.prepare(self._offset + starts * size, lengths * size)


def _open(path: Path, name: str) -> int:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError as error:
        raise DataError(f"{name}: no such file; `etude tokenize` makes token files") from error
    except OSError as error:
        raise DataError(f"{name} cannot be opened ({error.strerror})") from error
    except ValueError as error:  # a null byte in the path
        raise DataError(f"{name!r} is not a path ({error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{name} is not a file; name the token file itself, such as data/tokenized/train.bin")
    return descriptor


def mapping_limit() -> float:
    """Return how large a file may be to be mapped: half of the least memory limit that is set for this process.

    Mapped pages count as memory of the process, and as address space, though the system can take them back. Where a
    limit is set (ulimit -v, -d or -m), files that would use it up are read by system calls.
    """
    if sys.platform == "win32":
        return math.inf
    import resource

    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_RSS)
    limits = [soft for soft, _ in map(resource.getrlimit, kinds) if soft != resource.RLIM_INFINITY]
    return min(limits) / 2 if limits else math.inf


def _map(descriptor: int, name: str) -> mmap.mmap | None:
    """Map a file into memory; None where the address space, or the file system, has no room for that."""
    try:
        if sys.version_info >= (3, 13):
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except MemoryError:
        return None
    except (OSError, ValueError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else errno.ENOMEM
        if number in (errno.ENOMEM, errno.ENODEV, errno.EINVAL, errno.EOVERFLOW):
            return None
        raise DataError(f"{name} cannot be mapped into memory ({error})") from error
