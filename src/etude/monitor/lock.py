"""A lock on a folder that the kernel frees when its process dies, however it dies."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from etude.core import RunFolderError

if sys.platform != "win32":
    import fcntl

_HELD: set[int] = set()
"""Descriptors of the locks of this process."""


class FolderLock:
    """Holds a lock file while it is entered; another process, or another lock of this one, gets RunFolderError.

    The file stays behind and names the last holder: removing it would let two processes lock two different files
    of the same name. Where the system or the file system has no locks, entering always succeeds.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        """`owner` is kept in the file beside the number of the process: it tells who held the folder last."""
        self.path = path
        self.owner = owner
        self.last_holder = ""
        """What the file said before: process and owner of the last lock; nothing if there was none."""
        self._descriptor: int | None = None

    def __enter__(self) -> "FolderLock":
        assert self._descriptor is None, "already entered"
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(
                f"cannot write run folder {self.path.parent}: {error.strerror or error}; "
                f"make it writable, or copy it to where you may write"
            ) from error
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = next(iter(_content(descriptor).split()), "another one")
            os.close(descriptor)
            raise RunFolderError(
                f"run folder {self.path.parent} is in use by process {holder}; wait until it ends, stop it, "
                f"or give another folder with --run-dir"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _HELD.add(descriptor)
        self.last_holder = _content(descriptor)
        with suppress(OSError):  # a full disk: an empty file is read as "nobody"
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"{os.getpid()} {self.owner}".rstrip().encode() + b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor in _HELD:
            _HELD.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 128).decode(errors="replace").strip()


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return  # this file system has no locks: training on it beats refusing to


def _forget_in_child() -> None:
    """Close a forked child's copies: a data worker that outlives its killed parent must not keep the lock."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)
