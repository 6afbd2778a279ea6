"""Where a token file lies: a path of this machine, or an address that fsspec knows, of which a copy is made."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from etude.core.errors import DataError
from etude.core.files import FolderLock, cache_folder, replacing

logger = logging.getLogger("etude")

ATTEMPTS = 4
RETRY_DELAY_S = 0.5
"""The wait before the second attempt; it doubles with each."""

_LOCAL = ("file://", "local://")
_VERSION_KEYS = {"size", "etag", "last-modified", "lastmodified", "mtime", "modified", "created", "generation"}
_VERSION_KEYS |= {"versionid", "md5", "md5hash", "content-md5", "digest", "checksum", "blob_id"}
_HEAD_BYTES = 64
"""The first bytes of the project's own files hold a checksum of everything."""

_PIECE_BYTES = 16 * 2**20

Answer = TypeVar("Answer")


def is_remote(name: str) -> bool:
    """Return whether a name is an address of something that is not on this machine.

    >>> is_remote("s3://bucket/train.bin"), is_remote("data/train.bin"), is_remote("file:///data/train.bin")
    (True, False, False)
    """
    return ("://" in name or "::" in name) and not name.startswith(_LOCAL)


def local_path(name: str) -> Path:
    """Return the path that a name of a local file means."""
    for prefix in _LOCAL:
        name = name.removeprefix(prefix)
    return Path(name)


def exists(name: str) -> bool:
    """Return whether there is such a file; raises DataError if a server does not say so."""
    if not is_remote(name):
        return local_path(name).is_file()
    filesystem, path = _filesystem(name)
    try:
        return bool(_patiently(name, lambda: filesystem.info(path)).get("type") == "file")
    except (FileNotFoundError, PermissionError):  # S3 forbids to ask for what is not there
        return False


def local_copy(name: str) -> Path:
    """Return the path of a local file, or that of a copy of a remote one, fetched once for each of its versions."""
    if not is_remote(name):
        return local_path(name)
    version = _version(name)
    folder = cache_folder("tokens") / hashlib.sha256(f"{name} {version}".encode()).hexdigest()[:32]
    copy = folder / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder / ".lock", wait=True, keep=False):
            if not copy.exists():
                logger.warning("fetching %s into %s, once", name, copy)
                with replacing(copy) as file:
                    _patiently(name, lambda: _fetch(name, file))
                    if _version(name) != version:
                        raise DataError(f"{name} has changed while it was being read; open it again")
    except OSError as error:
        raise DataError(
            f"{folder} cannot hold the local copy of {name} ({error.strerror}); set ETUDE_CACHE_DIR to a folder with "
            f"room for it"
        ) from error
    return copy


def _fetch(url: str, target: IO[bytes]) -> None:
    filesystem, path = _filesystem(url)
    target.seek(0)
    target.truncate()
    with filesystem.open(path, "rb") as source:
        shutil.copyfileobj(source, target, _PIECE_BYTES)


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it. Cached by fsspec."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"{url} is a remote file; to read it `pip install 'etude[remote]'`") from error
    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise DataError(f"{url} cannot be opened ({_words(error)})") from error
    return filesystem, str(path)


def _version(url: str) -> str:
    """Return what tells the versions of a remote file apart: size, etag, time of change, checksum, first bytes."""
    filesystem, path = _filesystem(url)
    filesystem.invalidate_cache(path)
    try:
        info = _patiently(url, lambda: filesystem.info(path))
        if info.get("type") == "directory":
            raise DataError(f"{url} is not a file")
        head = _patiently(url, lambda: filesystem.cat_file(path, start=0, end=_HEAD_BYTES))
    except (FileNotFoundError, PermissionError) as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"may not be read ({_words(error)})"
        raise DataError(f"{url}: {problem}") from error
    facts = {key.lower(): str(value) for key, value in info.items() if key.lower() in _VERSION_KEYS}
    return json.dumps(facts | {"head": head.hex()}, sort_keys=True)


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


def _words(error: object) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
