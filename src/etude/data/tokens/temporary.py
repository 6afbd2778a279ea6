"""Temporary files beside a target: locked while they are written, so that those of killed writers can be removed."""

import contextlib
import glob
import os
import sys
import tempfile
from pathlib import Path


def make_temporary(target: Path) -> tuple[int, Path]:
    """Make a file beside the target that is locked for as long as it is open."""
    while True:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            _lock(handle)
        except BlockingIOError:
            abandoned = True
        except OSError:  # a file system without locks, on which nothing is ever removed
            abandoned = False
        else:
            abandoned = not os.fstat(handle).st_nlink
        if not abandoned:
            return handle, Path(name)
        os.close(handle)  # another writer has taken it for abandoned between the two calls


def remove_abandoned(target: Path) -> None:
    """Remove what writers of this target have left that were killed: nobody holds the lock on it."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDWR)
            try:
                _lock(descriptor)
                left.unlink()
            finally:
                os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock a file for as long as it is open; raises BlockingIOError if somebody else has."""
    if sys.platform != "win32":  # which does not remove open files anyway
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
