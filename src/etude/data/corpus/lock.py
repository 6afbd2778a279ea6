"""A lock on an output folder that the kernel frees when its process dies, however it dies."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from etude.core.errors import DataError

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder. If another process holds it: wait until it ends, or raise DataError."""
    path = folder / ".lock"
    descriptor = None
    while descriptor is None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, wait)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "another one"
            os.close(descriptor)
            raise DataError(
                f"{folder} is being written by process {holder}; wait until it ends, or give another --out"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        if not _same_file(descriptor, path):  # its last holder removed it while this process waited
            os.close(descriptor)
            descriptor = None
    try:
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is only for people
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(
                missing_ok=True
            )  # before it is freed: whoever waits sees that it is gone, and makes a new one
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, wait: bool) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return  # this file system has no locks
