"""Remote token files: blocks fetched when they are first read, into a sparse local file that is read like any other.

fsspec finds and reads the remote file. Its own caches of blocks are not used: they count a block as present before it
is fetched, and forget which are when the process is killed.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from etude.core.errors import DataError
from etude.core.files import cache_folder
from etude.data.tokens.layout import PREAMBLE_BYTES
from etude.data.tokens.vectors import Ints

logger = logging.getLogger("etude")

BLOCK_BYTES = 4 * 2**20
REQUEST_BLOCKS = 4
"""Neighbouring blocks are fetched by requests of up to this many."""
ROUND_BLOCKS = 16
"""Blocks held in memory at a time; the requests of a round are sent together."""
ATTEMPTS = 4
RETRY_DELAY_S = 0.5
"""The wait before the second attempt; it doubles with each."""

_VERSION_KEYS = {"etag", "last-modified", "lastmodified", "mtime", "modified", "created", "generation", "versionid"}
_VERSION_KEYS |= {"md5", "md5hash", "content-md5", "digest", "checksum", "blob_id"}

Answer = TypeVar("Answer")


def remote_exists(url: str) -> bool:
    """Return whether there is such a remote file; raises DataError if that cannot be found out."""
    filesystem, path = _filesystem(url)
    try:
        return bool(_patiently(url, lambda: filesystem.info(path)).get("type") == "file")
    except (FileNotFoundError, PermissionError):  # S3 forbids to ask for what is not there
        return False


class RemoteCopy:
    """The local copy of one version of a remote file: a sparse file, and a byte per block that says it is there.

    A block's byte is set only after its data is on the disk, so that a process killed at any moment leaves a copy that
    is right. Several processes may fill one copy: the same block is then written twice with the same bytes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._size, self._version = _describe(url)
        digest = hashlib.sha256(json.dumps([url, self._size, self._version]).encode()).hexdigest()
        folder = cache_folder("tokens") / digest[:32]
        self.path, present = folder / "data", folder / "blocks"
        # By process: one that was forked must not wait for a thread of its parent.
        self._locks: dict[int, threading.Lock] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "source.txt").write_text(f"{url.split('?')[0]}\n")  # for people; what follows may be secret
            if not self.path.exists():
                present.unlink(missing_ok=True)  # of a copy that somebody has deleted to make room
            _extend(self.path, self._size)
            _extend(present, max(-(-self._size // BLOCK_BYTES), 1))
            self._present = np.memmap(present, np.uint8, "r+")
        except OSError as error:
            self._cannot_store(error)

    def prepare(self, offsets: Ints, sizes: Ints | int) -> None:
        """Fetch the blocks that hold these bytes and are not there yet."""
        if not offsets.size or not self._size:
            return
        first = np.minimum(offsets, self._size - 1) // BLOCK_BYTES
        last = np.maximum((offsets + sizes - 1) // BLOCK_BYTES, first)
        if int((last - first).max()) > 1:
            wanted = np.concatenate([np.arange(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        else:
            wanted = np.concatenate([first, last])
        if self._present[wanted].all():
            return
        with self._locks.setdefault(os.getpid(), threading.Lock()):  # threads do not fetch the same block twice
            missing = np.unique(wanted[self._present[wanted] == 0])
            for start in range(0, len(missing), ROUND_BLOCKS):
                self._fetch(missing[start : start + ROUND_BLOCKS])

    def _fetch(self, blocks: Ints) -> None:
        from fsspec.utils import merge_offset_ranges  # type: ignore[import-untyped]

        starts, ends = blocks * BLOCK_BYTES, np.minimum((blocks + 1) * BLOCK_BYTES, self._size)
        limit = REQUEST_BLOCKS * BLOCK_BYTES
        _, *merged = merge_offset_ranges([""] * len(blocks), starts.tolist(), ends.tolist(), max_block=limit)
        ranges = list(zip(*merged, strict=True))
        pieces: dict[tuple[int, int], bytes] = {}
        _patiently(self.url, lambda: self._download(ranges, pieces))
        if _describe(self.url) != (self._size, self._version):
            raise DataError(f"{self.url} has changed while it was being read; open it again")
        try:
            with self.path.open("r+b") as file:
                for (start, _), piece in pieces.items():
                    file.seek(start)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._cannot_store(error)
        self._present[blocks] = 1

    def _download(self, ranges: list[tuple[int, int]], pieces: dict[tuple[int, int], bytes]) -> None:
        """Ask for the ranges that are not there yet, together; raises OSError if one of them does not come."""
        wanted = [part for part in ranges if part not in pieces]
        filesystem, path = _filesystem(self.url)
        starts, ends = zip(*wanted, strict=True)
        answers = filesystem.cat_ranges([path] * len(wanted), list(starts), list(ends), on_error="return")
        problem = ""
        for part, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, bytes) and len(answer) == part[1] - part[0]:
                pieces[part] = answer
            else:
                found = f"{len(answer):,} bytes" if isinstance(answer, bytes) else _words(answer)
                problem = f"asked for {part[1] - part[0]:,} bytes from {part[0]:,}, got {found}"
        if problem:
            raise OSError(problem)

    def _cannot_store(self, error: OSError) -> None:
        raise DataError(
            f"{self.path.parent} cannot hold the local copy of {self.url} ({error.strerror}); set ETUDE_CACHE_DIR to a "
            "folder with room for it"
        ) from error


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it. Cached by fsspec, again in a forked process."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{url} is a remote file; to read it `pip install 'etude[remote]'`") from error
    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise DataError(f"{url} cannot be opened ({_words(error)})") from error
    return filesystem, str(path)


def _describe(url: str) -> tuple[int, str]:
    """Return the size of a remote file, and what tells its versions apart: etag, time of change or checksum."""
    filesystem, path = _filesystem(url)
    filesystem.invalidate_cache(path)
    try:
        info = _patiently(url, lambda: filesystem.info(path))
    except FileNotFoundError as error:
        raise DataError(f"{url}: no such file") from error
    except PermissionError as error:
        raise DataError(f"{url} may not be read ({_words(error)})") from error
    size = info.get("size")
    if info.get("type") == "directory" or not isinstance(size, int):
        raise DataError(f"{url} is not a file of known size; only those can be read in parts")
    version = {key.lower(): str(value) for key, value in info.items() if key.lower() in _VERSION_KEYS}
    if not version:  # the first bytes of the project's own files hold a checksum of everything
        head = _patiently(url, lambda: filesystem.cat_file(path, start=0, end=min(PREAMBLE_BYTES, size)))
        version = {"head": head.hex()}
    return size, json.dumps(version, sort_keys=True)


def _patiently(url: str, ask: Callable[[], Answer]) -> Answer:
    """Ask a file system something, a few times; raises DataError if it does not answer."""
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # every file system has its own
            if attempt == ATTEMPTS - 1:
                raise DataError(
                    f"{url} cannot be read ({_words(error)}, {ATTEMPTS} times); check address and connection"
                ) from error
            logger.warning("%s: %s; trying again", url, _words(error))
            time.sleep(RETRY_DELAY_S * 2**attempt)
    raise AssertionError


def _extend(path: Path, size: int) -> None:
    """Make a file at least this large; nobody ever makes it smaller."""
    with path.open("ab") as file:
        if file.seek(0, os.SEEK_END) < size:
            file.truncate(size)


def _words(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
