"""Durable files and folders: hashed while written, synced to disk, renamed into place."""

import contextlib
import hashlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from etude.core.files import beside, sync_folder, try_lock
from etude.core.run_layout import DELETED, REPLACED, TEMPORARY, original_name

_PIECE_BYTES = 8 << 20
_INLINE_BYTES = 1 << 20
_POINTER_BYTES = 255
_log = logging.getLogger(__name__)


class HashedFile:
    """A new file whose SHA-256 is computed while it is written, so that it need not be read back."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. A large chunk is hashed by a second thread while this one writes it."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            if len(piece) < _INLINE_BYTES:
                self._hash.update(piece)
                self._write_all(piece)
                continue
            hashing = threading.Thread(target=self._hash.update, args=(piece,))
            hashing.start()
            try:
                self._write_all(piece)
            finally:
                hashing.join()

    def _write_all(self, view: memoryview) -> None:
        while view:  # the system may write less than requested
            written = os.write(self._fd, view)
            self.size += written
            view = view[written:]

    @property
    def sha256(self) -> str:
        """The checksum of everything written so far."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Sync the file to disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file without syncing."""
        os.close(self._fd)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes `target`, complete and synced to disk, or not at all.

    An existing folder is replaced. A crash between the two renames leaves it under a name that `find_folders`
    recognises, so a reader always finds the old or the new one.
    """
    _make_root(target.parent)
    temporary = beside(target, TEMPORARY)
    temporary.mkdir()
    try:
        with _locked(temporary):  # tells `clean_leftovers` of other processes that the writer is alive
            yield temporary
            sync_folder(temporary)
            _put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def delete_folder(folder: Path) -> None:
    """Delete a folder so that a crash during deletion leaves nothing that looks like a damaged checkpoint."""
    _remove(folder.rename(beside(folder, DELETED)))


def find_folders(root: Path) -> dict[str, Path]:
    """Return the finished folders of `root` by name, including one in the middle of a replacement."""
    found, replaced = {}, {}
    for path in sorted(root.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(REPLACED):
            replaced[original_name(path.name)] = path
        elif not path.name.startswith((TEMPORARY, DELETED)):
            found[path.name] = path
    return {**replaced, **found}


def clean_leftovers(root: Path) -> list[str]:
    """Remove the leftovers of dead writers in `root` and return their names; finished checkpoints are kept.

    A checkpoint that was renamed for a replacement that was never completed gets its name back.
    """
    cleaned = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not path.name.startswith((TEMPORARY, REPLACED, DELETED)) or not _is_abandoned(path):
            continue
        original = root / original_name(path.name)
        if path.name.startswith(REPLACED) and not original.exists():
            path.rename(original)
        else:
            _remove(path)
        cleaned.append(path.name)
    return cleaned


def follow(path: Path) -> Path:
    """Return the sibling folder that a text file names (`last` and `best` without symbolic links); else `path`.

    Archives and git turn links into the same text file on systems without links.
    """
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _POINTER_BYTES:
            return path
        target = path.with_name(path.read_text(encoding="utf-8").strip())  # ValueError unless it is a bare name
        return target if target.is_dir() else path
    except (OSError, ValueError):
        return path


def _make_root(root: Path) -> None:
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename a folder to `target`, replacing an existing one; a reader always finds one of them."""
    aside: Path | None = None
    if target.exists():
        aside = target.rename(beside(target, REPLACED))
    try:
        folder.rename(target)
    except OSError:
        if aside is not None:
            aside.rename(target)
        raise
    sync_folder(target.parent)
    if aside is not None:
        _remove(aside)


def _remove(path: Path) -> None:
    """Remove a leftover; a failure is only logged, since it must not end the run."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        _log.warning("could not remove %s: %s", path, error.strerror)


def _is_abandoned(path: Path) -> bool:
    """Return whether no live process is writing `path`. A lock ends with its process; process ids are reused."""
    if path.is_symlink():
        return True
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:  # removed in the meantime, or no permission to open it
        return False
    try:
        return try_lock(fd) is not False  # without locks this is unknown: assume a leftover
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if sys.platform == "win32":  # Windows cannot open a folder
        yield
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(fd)
        yield
    finally:
        os.close(fd)
