"""The layout of a token file: writing and validating preamble and header. See docs/design/0007-token-files.md."""

import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from etude.core.errors import DataError
from etude.core.spelling import shorten

MAGIC = b"ETUDETOK"
VERSION = 1
ALIGNMENT = 64
PREAMBLE = struct.Struct("<8sIIQQQ20x")
"""Magic, version, CRC-32 of the header, its offset and size, size of the file; then a CRC-32 of these 60 bytes."""
PREAMBLE_BYTES = 64

Kind = Literal["tokens", "index", "stream", "label"]
SINGLE = ("tokens", "index")
"""Kinds with exactly one section, and its name."""
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
DTYPES: dict[Kind, Sequence[str]] = {
    "tokens": ("uint16", "uint32"),
    "index": ("uint64",),
    "stream": _INTEGERS,
    "label": (*_INTEGERS, "float16", "float32", "float64"),
}

_MAX_HEADER = 64 * 2**20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class FileSection:
    """One array of the file. The first dimension of its shape counts tokens, samples, or samples + 1 (the index)."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    crc32: int

    def problem(self) -> str | None:
        """Return which of its values is invalid in any file; None if all are valid."""
        sizes = (*self.shape, self.offset, self.bytes, self.crc32) if isinstance(self.shape, (list, tuple)) else (-1,)
        if (problem := declaration_problem(self.name, self.kind, self.dtype)) is not None:
            return problem
        if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
            return "shape, offset, bytes and crc32 must be non-negative integers"
        if not 1 <= len(self.shape) <= (2 if self.kind == "label" else 1) or 0 in self.shape[1:]:
            return f"shape {self.shape}"
        if self.bytes != math.prod(self.shape) * np.dtype(self.dtype).itemsize:
            return f"shape {self.shape} does not take {self.bytes:,} bytes"
        return f"offset {self.offset:,} is not a multiple of {ALIGNMENT}" if self.offset % ALIGNMENT else None


Sections = dict[str, FileSection]
"""The sections of a file by name, tokens and index among them."""


def declaration_problem(name: object, kind: object, dtype: object) -> str | None:
    """Return why a section of this name, kind and dtype is invalid; None if it is valid."""
    if not isinstance(kind, str) or kind not in get_args(Kind):
        return f"kind {kind!r}; allowed are {', '.join(DTYPES)}"
    if not isinstance(name, str) or (name != kind if kind in SINGLE else name in SINGLE or not _NAME.fullmatch(name)):
        return f"name {name!r}; allowed are up to 64 letters, digits and _.-"
    allowed = DTYPES[kind]  # type: ignore[index]
    return None if dtype in allowed else f"dtype {dtype!r}; allowed are {' or '.join(allowed)}"


def encode_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata after a JSON round trip; raises DataError if JSON cannot hold it."""
    try:
        result = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the meta of a token file must be plain JSON values ({error})") from error
    assert isinstance(result, dict)
    _check_meta(result)
    return result


def encode_header(sections: Sequence[FileSection], meta: Mapping[str, Any]) -> bytes:
    """Return the header as JSON, the same bytes for the same contents."""
    content = {"meta": dict(meta), "sections": [asdict(section) for section in sections]}
    return json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def encode_preamble(header: bytes, offset: int) -> bytes:
    """Return the first 64 bytes of a file whose header, the last thing in it, lies at this offset."""
    raw = PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(header), offset, len(header), offset + len(header))
    return raw + struct.pack("<I", zlib.crc32(raw))


def read_header(read: Callable[[int, int], bytes], size: int, name: str) -> tuple[Sections, dict[str, Any]]:
    """Return the sections and the metadata of a file of this size, after validating its header.

    `read` returns bytes from an offset.

    Raises DataError for a damaged, truncated or newer file.
    """
    raw = read(0, PREAMBLE_BYTES)
    if len(raw) < PREAMBLE_BYTES or struct.unpack("<I", raw[60:64])[0] != zlib.crc32(raw[:60]):
        raise DataError(f"{name} is damaged: its first 64 bytes do not match their checksum; create or copy it again")
    _, version, crc, offset, header_bytes, file_bytes = PREAMBLE.unpack(raw[:60])
    if version != VERSION:
        raise DataError(f"{name} has version {version} of the token format, this etude reads {VERSION}; update etude")
    if size != file_bytes:
        problem = "cut" if size < file_bytes else "longer than it was written"
        raise DataError(f"{name} is {problem}: {size:,} bytes, expected {file_bytes:,}; create or copy it again")
    if not 0 < header_bytes <= _MAX_HEADER or offset < PREAMBLE_BYTES or offset + header_bytes > size:
        raise DataError(f"{name}: a header of {header_bytes:,} bytes at {offset:,} is outside the file")
    raw = read(offset, header_bytes)
    if zlib.crc32(raw) != crc:
        raise DataError(f"{name} is damaged: its header does not match its checksum; create or copy it again")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: its header is not JSON ({str(error)[:100]})") from error
    try:
        return _checked(content, (offset, offset + header_bytes), size)
    except DataError as error:
        raise DataError(f"{name}: its header is invalid: {error}; fix the program that wrote it") from error


def _checked(content: Any, place: tuple[int, int], size: int) -> tuple[Sections, dict[str, Any]]:
    """Return the contents of the header, if its sections are valid, consistent and inside the file."""
    if not isinstance(content, dict) or not isinstance(content.get("sections"), list):
        raise DataError("it must be an object with a list of sections")
    _check_meta(meta := content.get("meta", {}))
    sections = {section.name: section for section in map(_section, content["sections"])}
    if len(sections) < len(content["sections"]) or not sections.keys() >= set(SINGLE):
        raise DataError("it must have sections 'tokens' and 'index', and none twice")
    (num_tokens,), (num_offsets,) = (sections[name].shape for name in SINGLE)
    counts = {"tokens": num_tokens, "index": max(num_offsets, 1), "stream": num_tokens, "label": num_offsets - 1}
    # Sections are inside the file, and do not overlap each other, the preamble or the header.
    places = [(0, PREAMBLE_BYTES, "preamble"), (*place, "header")]
    for section in sections.values():
        name, end, count = section.name, section.offset + section.bytes, counts[section.kind]
        if section.shape[0] != count:
            raise DataError(f"section {name!r} has {section.shape[0]:,} entries, expected {count:,}")
        if end > size:
            raise DataError(f"section {name!r} ends at {end:,}, beyond the file's {size:,} bytes")
        if section.bytes:
            places.append((section.offset, end, name))
    for (_, end, first), (start, _, second) in pairwise(sorted(places)):
        if end > start:
            raise DataError(f"{first!r} and {second!r} overlap")
    return sections, meta


def _section(entry: Any) -> FileSection:
    try:
        section = FileSection(**entry)
    except TypeError as error:
        raise DataError(f"a section has wrong keys, found {_short(entry)}") from error
    if (problem := section.problem()) is not None:
        raise DataError(f"section {_short(section.name)} has {shorten(problem, 200)}")
    return section


def _check_meta(meta: Any) -> None:
    size = meta.get("vocab_size") if isinstance(meta, dict) else meta
    if not isinstance(meta, dict) or (size is not None and not (type(size) is int and 0 < size <= 2**32)):
        raise DataError(f"meta must be an object, and vocab_size a positive integer, found {_short(size)}")


def _short(value: Any) -> str:
    return shorten(repr(value))
