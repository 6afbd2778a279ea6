"""Opening the bytes of a token file: mapped into memory, or read by system calls where there is no room for that."""

import errno
import math
import mmap
import os
import stat
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.vectors import FetchedVector, MappedVector, PreadVector, Prepare, Vector, read_into


class Storage:
    """An open file of a known size. `name` is what the user called it, in messages."""

    def __init__(self, path: Path, *, name: str, memory_map: bool = True, prepare: Prepare | None = None) -> None:
        self.name, self._prepare = name, prepare
        descriptor = _open(path, name)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size
        self._mapping = _map(descriptor, name) if memory_map and 0 < self.size <= mapping_limit() else None
        if self._mapping is not None:
            self._close()  # the mapping holds the file open by itself

    def read(self, offset: int, size: int) -> bytes:
        """Return a few bytes; fewer than `size` where the file ends."""
        size = max(min(size, self.size - offset), 0)
        if size and self._prepare is not None:
            self._prepare(np.array([offset]), size)
        if self._mapping is not None:
            return self._mapping[offset : offset + size]
        buffer, place = bytearray(size), 0
        while place < size:
            place += read_into(self.name, self._descriptor, memoryview(buffer)[place:], offset + place)
        return bytes(buffer)

    def vector(self, offset: int, count: int, dtype: np.dtype[Any] | str) -> Vector:
        """Return the `count` values from a byte offset, which lie inside the file."""
        dtype = np.dtype(dtype).newbyteorder("<")
        assert 0 <= offset <= offset + count * dtype.itemsize <= self.size
        vector: Vector
        if self._mapping is not None:
            vector = MappedVector(self.name, self._mapping, offset, count, dtype)
        else:
            vector = _Held(self, self.name, self._descriptor, offset, count, dtype)
        return vector if self._prepare is None else FetchedVector(self.name, vector, self._prepare, offset)


class _Held(PreadVector):
    """Keeps its storage, and so the open file, alive."""

    def __init__(self, storage: Storage, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._storage = storage


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
