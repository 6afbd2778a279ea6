"""Files known by their SHA-256: read from a folder or the cache, and always verified."""

import hashlib
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from etude.core.errors import DataError
from etude.core.files import write_bytes

logger = logging.getLogger("etude")

MAX_BYTES = 256 * 2**20
"""Maximum size of any file read here; guards against archives that unpack without end."""

Content = bytes | memoryview
Found = tuple[Mapping[str, Content], str]
"""The files of a source, by name, and why others are missing ("" if none are)."""


def mismatch(raw: Content, sha256: str) -> str:
    """Return "" if the bytes have this checksum, else a short description of the mismatch.

    >>> mismatch(b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    ''
    >>> mismatch(b"abd", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    'its SHA-256 is a52d159f262b…, expected ba7816bf8f01…'
    """
    found = hashlib.sha256(raw).hexdigest()
    return "" if found == sha256 else f"its SHA-256 is {found[:12]}…, expected {sha256[:12]}…"


def gunzip(packed: Content) -> bytes:
    """Unpack gzip data, up to MAX_BYTES. Raises DataError if it is damaged, truncated or larger."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        raw = unpacker.decompress(packed, MAX_BYTES)
    except zlib.error as error:
        raise DataError(f"not a readable gzip file ({error})") from error
    if not unpacker.eof:
        raise DataError("a truncated or oversized gzip file")
    return raw


def from_folder(folder: Path, files: Mapping[str, str]) -> Found:
    """Read files, plain or as .gz, from a folder the user named (or its raw/ or MNIST/raw/).

    Raises DataError if a file exists but is damaged, instead of silently using another one.
    """
    if not folder.is_dir():
        return {}, "no such folder"
    found: dict[str, Content] = {}
    for name, sha256 in files.items():
        for place in (folder, folder / "raw", folder / "MNIST" / "raw"):
            path = next((p for p in (place / name, place / f"{name}.gz") if p.is_file()), None)
            if path is not None:
                found[name] = _read_verified(path, sha256)
                break
    return found, _absent(files, found)


def from_cache(folder: Path, files: Mapping[str, str]) -> Found:
    """Read files from the cache; a damaged one is reported and skipped, so that it is downloaded again."""
    found: dict[str, Content] = {}
    damaged = []
    for name, sha256 in files.items():
        if (folder / name).is_file() or (folder / f"{name}.gz").is_file():
            try:
                found.update(from_folder(folder, {name: sha256})[0])
            except DataError as error:
                logger.warning("%s; fetching it again", error)
                damaged.append(name)
    return found, f"{', '.join(damaged)} damaged" if damaged else _absent(files, found)


def store(folder: Path, name: str, raw: Content) -> None:
    """Store a file in the cache; a failure is only logged."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / name, bytes(raw))
        (folder / f"{name}.gz").unlink(missing_ok=True)  # a packed file here was missing or damaged
    except OSError as error:
        logger.warning("%s cannot be cached in %s (%s)", name, folder, error.strerror)


def _read_verified(path: Path, sha256: str) -> Content:
    try:
        raw: Content = np.fromfile(path, np.uint8).data  # writable, so that an array needs no copy
        problem = mismatch(raw := gunzip(raw) if path.suffix == ".gz" else raw, sha256)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    except DataError as error:
        problem = str(error)
    if problem:
        raise DataError(f"{path} is damaged: {problem}; replace or delete it")
    return raw


def _absent(files: Mapping[str, str], found: Mapping[str, Content]) -> str:
    absent = [name for name in files if name not in found]
    return f"no {', '.join(absent)}" if absent else ""
