"""Files that survive a crash: written whole or not at all, synced to the disk, locked until their process ends.

A full disk, `kill -9` and two writers at once lose nothing: whoever reads `path` finds the old file or the new one.
This module imports the standard library alone; worker processes that tokenize load it without torch.
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
    """A file on its way to `path`: it has a temporary name beside it until `commit`, and is locked meanwhile.

    What writers of the same path left behind when they were killed is removed: nobody holds the lock on it.
    """

    def __init__(self, path: str | Path, buffering: int = -1) -> None:
        self.path = Path(path)
        _remove_abandoned(self.path)
        descriptor, self._temporary = _make_temporary(self.path)
        self.file: IO[bytes] = os.fdopen(descriptor, "w+b", buffering)

    def commit(self) -> None:
        """Close the file and give it its name; once this returns the disk has both."""
        self._sync()
        if sys.platform == "win32":  # an open file cannot be renamed there
            self.file.close()
        self._temporary.replace(self.path)  # still locked, so that no other writer takes it for abandoned
        self.file.close()
        sync_folder(self.path.parent)

    def commit_new(self) -> bool:
        """As `commit`, but never replace a file: False if one is there already. Of two writers at once one wins."""
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
        """Close and remove the file; what has been under the name `path` stays."""
        with contextlib.suppress(OSError):
            self._temporary.unlink()
        with contextlib.suppress(OSError):  # a full disk fails again when a buffer is flushed
            self.file.close()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Yield a file to write; if the block succeeds it becomes `path`, on the disk, else `path` is untouched.

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
    """Write a text file atomically, in UTF-8 and with its line ends as they are."""
    write_bytes(path, text.encode())


def create_text(path: str | Path, text: str) -> bool:
    """Write a text file atomically where there is none; False if there is one, which stays as it is."""
    new = NewFile(path)
    try:
        new.file.write(text.encode())
        return new.commit_new()
    except BaseException:
        new.discard()
        raise


def sync_folder(folder: Path) -> None:
    """Return once the disk has the names in `folder`, where the system can sync a folder and lets us open it."""
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
    """Return a new name in the same folder that says what it is for: .tmp-step-00000010-1a2b3c4d."""
    return path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}{suffix}")


def cache_folder(name: str) -> Path:
    """Return the folder where `name` is cached: in $ETUDE_CACHE_DIR, else in the user's cache directory."""
    if own := os.environ.get("ETUDE_CACHE_DIR"):
        return Path(own).expanduser() / name
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "etude" / name


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until it is closed, or its process dies in any way.

    False: somebody else has locked it. None: there are no locks on this system or file system.
    """
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


class LockHeld(Exception):
    """Another process, or another lock of this one, holds the lock; `holder` is its process number, if known."""

    def __init__(self, holder: str) -> None:
        self.holder = holder or "another one"
        super().__init__(f"held by process {self.holder}")


class FolderLock:
    """Holds a lock file while it is entered; entering raises LockHeld if somebody else does, unless it may `wait`.

    The file names the process. With `keep` it stays behind; without, it is removed.
    Where the system or the file system has no locks, entering always succeeds: working there beats refusing to.
    """

    def __init__(self, path: Path, *, wait: bool = False, keep: bool = True) -> None:
        self.path = path
        self.wait, self.keep = wait, keep
        self._descriptor: int | None = None

    def __enter__(self) -> "FolderLock":
        assert self._descriptor is None, "already entered"
        descriptor = self._open()
        while not _is_at(descriptor, self.path):  # its last holder removed it while this process waited
            os.close(descriptor)
            descriptor = self._open()
        self._descriptor = descriptor
        _HELD.add(descriptor)
        with contextlib.suppress(OSError):  # a full disk: an empty file is read as "nobody"
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
                    self.path.unlink()  # before it is freed: whoever waits sees that it is gone, and makes a new one
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
    """Make a file beside the target that is locked for as long as it is open."""
    while True:
        path = beside(target, ".", ".tmp")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # another writer has taken it for abandoned between the two calls


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
    """Close a forked child's copies: a data worker that outlives its killed parent must not keep the lock."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)
