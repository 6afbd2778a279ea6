"""Locations of token files: a local path, or an address that fsspec supports, whose blocks are cached locally."""

import hashlib
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.core.files import cache_folder

logger = logging.getLogger("etude")

ATTEMPTS = 4
RETRY_DELAY_S = 0.5
"""The delay before the second attempt; it doubles each time."""

_LOCAL = ("file://", "local://")
_VERSION_KEYS = {"size", "etag", "last-modified", "lastmodified", "mtime", "modified", "created", "generation"}
_VERSION_KEYS |= {"versionid", "md5", "md5hash", "content-md5", "digest", "checksum", "blob_id"}
_HEAD_BYTES = 64
"""The first bytes of etude's files contain a checksum of everything."""

BLOCK_BYTES = 4 * 2**20
"""Minimum size that is fetched from a remote file."""
ROUND_BLOCKS = 16
"""Blocks that are fetched together at most."""

Ints = NDArray[np.int64]
Answer = TypeVar("Answer")


def is_remote(name: str) -> bool:
    """Return whether a name is a remote address.

    >>> is_remote("s3://bucket/train.bin"), is_remote("data/train.bin"), is_remote("file:///data/train.bin")
    (True, False, False)
    """
    return ("://" in name or "::" in name) and not name.startswith(_LOCAL)


def local_path(name: str) -> Path:
    """Return the path of a local file name."""
    for prefix in _LOCAL:
        name = name.removeprefix(prefix)
    return Path(name)


def exists(name: str) -> bool:
    """Return whether the file exists; raises DataError if a server does not answer."""
    if not is_remote(name):
        try:
            return local_path(name).is_file()
        except (OSError, ValueError):  # a name that no system has
            return False
    filesystem, path = _filesystem(name)
    try:
        return bool(_patiently(name, lambda: filesystem.info(path)).get("type") == "file")
    except (FileNotFoundError, PermissionError):  # S3 answers "forbidden" for missing files
        return False


class RemoteFile:
    """A local file of the same size as a remote one, whose blocks are fetched once, when needed.

    A byte of `blocks` is set after its block is on disk. Processes that fetch the same block write the same bytes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.filesystem, self.path = _filesystem(url)
        self._version = _version(url)
        self.size = int(json.loads(self._version)["size"])
        self.folder = cache_folder("tokens") / hashlib.sha256(f"{url} {self._version}".encode()).hexdigest()[:32]
        self.copy, self._marks = self.folder / "data", self.folder / "blocks"
        with self._errors_of_the_disk():
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.copy.exists():
                self._marks.unlink(missing_ok=True)
            self.mapping = _mapped(self.copy, self.size)
            self._known = np.frombuffer(_mapped(self._marks, -(-self.size // BLOCK_BYTES)) or b"", np.uint8)

    def need(self, begins: Ints, ends: Ints) -> None:
        """Fetch the missing parts of the given byte ranges."""
        first, last = begins // BLOCK_BYTES, (ends - 1) // BLOCK_BYTES
        wanted = np.zeros(len(self._known), bool)
        wanted[first] = wanted[last] = True
        for begin, end in zip(first[last - first > 1], last[last - first > 1], strict=True):
            wanted[begin:end] = True
        missing = np.flatnonzero(wanted & (self._known == 0))
        for start in range(0, len(missing), ROUND_BLOCKS):
            self._fetch(missing[start : start + ROUND_BLOCKS])

    def _fetch(self, blocks: Ints) -> None:
        """Fetch some blocks, neighbouring ones by one request; the requests are sent together."""
        runs = np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1)
        begins = [int(run[0]) * BLOCK_BYTES for run in runs]
        ends = [min((int(run[-1]) + 1) * BLOCK_BYTES, self.size) for run in runs]

        def ask() -> list[bytes]:
            found: list[Any] = self.filesystem.cat_ranges([self.path] * len(runs), begins, ends, on_error="return")
            for raw, begin, end in zip(found, begins, ends, strict=True):
                if not isinstance(raw, bytes) or len(raw) != end - begin:
                    came = f"{len(raw)} bytes came" if isinstance(raw, bytes) else _words(raw)
                    raise OSError(f"of {end - begin} bytes {came}")
            return found

        pieces = _patiently(self.url, ask)
        if _version(self.url) != self._version:
            raise DataError(f"{self.url} has changed while it was being read; open it again")
        with self._errors_of_the_disk():
            write_at(self.copy, zip(begins, pieces, strict=True))
            write_at(self._marks, ((int(block), b"\1") for block in blocks))

    @contextmanager
    def _errors_of_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot hold the local copy of {self.url} ({error.strerror}); set ETUDE_CACHE_DIR to "
                "a folder with enough space"
            ) from error


def local_copy(name: str) -> Path:
    """Return the path of a local file, or that of a complete copy of a remote one."""
    if not is_remote(name):
        return local_path(name)
    file = RemoteFile(name)
    if file.size:
        file.need(np.array([0]), np.array([file.size]))
    return file.copy


def write_at(path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Write to some places of a file, and wait until all is on the disk."""
    with path.open("r+b") as file:
        for offset, raw in pieces:
            file.seek(offset)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _mapped(path: Path, size: int) -> mmap.mmap | None:
    """Return a file of this size, created if needed; None if the size is 0."""
    with path.open("ab") as file:
        file.truncate(size)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it. Cached by fsspec."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise DataError(f"{url} is a remote file; to read it `pip install 'etude[remote]'`") from error
    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise DataError(f"{url} cannot be opened ({_words(error)})") from error
    return filesystem, str(path)


def _version(url: str) -> str:
    """Return what identifies the version of a remote file: size, etag, modification time, checksum, first bytes."""
    filesystem, path = _filesystem(url)
    filesystem.invalidate_cache(path)
    try:
        info = _patiently(url, lambda: filesystem.info(path))
        if info.get("type") == "directory":
            raise DataError(f"{url} is not a file")
        facts = {key.lower(): str(value) for key, value in info.items() if key.lower() in _VERSION_KEYS}
        if not facts.keys() - {"size"}:
            facts["head"] = _patiently(url, lambda: filesystem.cat_file(path, start=0, end=_HEAD_BYTES)).hex()
    except (FileNotFoundError, PermissionError) as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"may not be read ({_words(error)})"
        raise DataError(f"{url}: {problem}") from error
    return json.dumps(facts, sort_keys=True)


def _patiently(url: str, ask: Callable[[], Answer]) -> Answer:
    """Call a file system with retries; raises DataError if it does not answer."""
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # every file system raises its own errors
            if attempt == ATTEMPTS - 1:
                raise DataError(
                    f"{url} cannot be read ({_words(error)}, {ATTEMPTS} times); check the address and the connection"
                ) from error
            logger.warning("%s: %s; trying again", url, _words(error))
            time.sleep(RETRY_DELAY_S * 2**attempt)
    raise AssertionError


def _words(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
