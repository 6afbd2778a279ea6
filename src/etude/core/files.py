"""Crash-safe files: written atomically, synced to disk, and locked until their process ends.

A full disk, `kill -9` or two concurrent writers lose nothing: a reader of `path` finds the old file or the new one.
This module imports only the standard library, so tokenizer worker processes can load it without torch.
"""

import contextlib
import errno
import glob
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

if sys.platform != "win32":
    import fcntl

_HELD: set[int] = set()
"""Descriptors of the folder locks of this process."""


class NewFile:
    """A file being written to `path`: until `commit` it has a temporary name in the same folder and is locked.

    Temporary files of killed writers of the same path are removed: they are no longer locked.
    """

    def __init__(self, path: str | Path, buffering: int = -1) -> None:
        self.path = Path(path)
        _remove_abandoned(self.path)
        descriptor, self._temporary = _make_temporary(self.path)
        self.file: IO[bytes] = os.fdopen(descriptor, "w+b", buffering)

    def commit(self) -> None:
        """Close the file and rename it to `path`; both are on disk when this returns."""
        self._sync()
        if sys.platform == "win32":  # Windows cannot rename an open file
            self.file.close()
        self._temporary.replace(self.path)  # still locked, so that no other writer treats it as abandoned
        self.file.close()
        sync_folder(self.path.parent)

    def commit_new(self) -> bool:
        """Like `commit`, but never replace a file: return False if it exists. Of two concurrent writers one wins."""
        self._sync()
        try:
            os.link(self._temporary, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if self.path.exists():
                return False
            self.commit()
            return True
        finally:
            self.discard()
        sync_folder(self.path.parent)
        return True

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def discard(self) -> None:
        """Close and remove the temporary file; an existing file at `path` stays."""
        with contextlib.suppress(OSError):
            self._temporary.unlink()
        with contextlib.suppress(OSError):  # on a full disk the flush on close fails again
            self.file.close()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Yield a file to write; it atomically becomes `path` if the block succeeds, else `path` is unchanged.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "note.txt") as file:
    ...         _ = file.write(b"whole")
    ...     (Path(folder) / "note.txt").read_text()
    'whole'
    """
    new = NewFile(path)
    try:
        yield new.file
        new.commit()
    except BaseException:
        new.discard()
        raise


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically, in UTF-8 and without translating line endings."""
    write_bytes(path, text.encode())


def create_text(path: str | Path, text: str) -> bool:
    """Write a text file atomically if there is none; return False and leave it unchanged if it exists."""
    new = NewFile(path)
    try:
        new.file.write(text.encode())
        return new.commit_new()
    except BaseException:
        new.discard()
        raise


def sync_folder(folder: Path) -> None:
    """Sync the folder's entries to disk, where the system supports it and we may open the folder."""
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def beside(path: Path, prefix: str, suffix: str = "") -> Path:
    """Return a new temporary name in the same folder that shows its purpose: .tmp-step-00000010-1a2b3c4d."""
    return path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}{suffix}")


def cache_folder(name: str) -> Path:
    """Return the folder where `name` is cached: in $ETUDE_CACHE_DIR, else in the user's cache directory."""
    if own := os.environ.get("ETUDE_CACHE_DIR"):
        return Path(own).expanduser() / name
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "etude" / name


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until it is closed or its process ends.

    Returns False if another process holds the lock, and None if the system or file system has no locks.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


class LockHeld(Exception):
    """Another process, or another lock object of this one, holds the lock; `holder` is its process id, if known."""

    def __init__(self, holder: str) -> None:
        self.holder = holder or "another one"
        super().__init__(f"held by process {self.holder}")


class FolderLock:
    """Holds a lock file while entered; entering raises LockHeld if it is already held, unless `wait` is set.

    The file contains the process id. It is removed on exit, unless `keep` is set. Where the system or the file system
    has no locks, entering always succeeds.
    """

    def __init__(self, path: Path, *, wait: bool = False, keep: bool = True) -> None:
        self.path = path
        self.wait, self.keep = wait, keep
        self._descriptor: int | None = None

    def __enter__(self) -> "FolderLock":
        assert self._descriptor is None, "already entered"
        descriptor = self._open()
        while not _is_at(descriptor, self.path):  # the last holder removed the file while this process waited
            os.close(descriptor)
            descriptor = self._open()
        self._descriptor = descriptor
        _HELD.add(descriptor)
        with contextlib.suppress(OSError):  # on a full disk the file stays empty, which means "holder unknown"
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor in _HELD:
            if not self.keep:
                with contextlib.suppress(OSError):
                    # remove it before unlocking: a waiting process sees that it is gone and makes a new file
                    self.path.unlink()
            _HELD.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if try_lock(descriptor) is False:
                if not self.wait:
                    raise LockHeld(next(iter(_content(descriptor).split()), ""))
                if sys.platform != "win32":
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _make_temporary(target: Path) -> tuple[int, Path]:
    """Create a file beside the target that is locked while it is open."""
    while True:
        path = beside(target, ".", ".tmp")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # another writer treated it as abandoned between the two calls


def _remove_abandoned(target: Path) -> None:
    for left in target.parent.glob(f".{glob.escape(target.name)}-*.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDWR)
            try:
                if try_lock(descriptor):
                    left.unlink()
            finally:
                os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 128).decode(errors="replace").strip()


def _forget_in_child() -> None:
    """Close the lock descriptors in a forked child: a data worker that outlives its parent must not keep the lock."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)
