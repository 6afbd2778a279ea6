"""The layout of a token file: preamble and header, made and checked. docs/design/0007-token-files.md describes it."""

import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, NoReturn

import numpy as np

from etude.core.errors import DataError
from etude.core.spelling import shorten

MAGIC = b"ETUDETOK"
VERSION = 1
ALIGNMENT = 64
PREAMBLE = struct.Struct("<8sIIQQQ20x")
"""Magic, version, CRC-32 of the header, its offset and size, size of the file; then a CRC-32 of these 60 bytes."""
PREAMBLE_BYTES = 64

TOKEN_DTYPES = ("uint16", "uint32")
STREAM_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
LABEL_DTYPES = (*STREAM_DTYPES, "float16", "float32", "float64")

_MAX_HEADER = 64 * 2**20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")

Kind = Literal["tokens", "index", "stream", "label"]
_SINGLE: tuple[Kind, ...] = ("tokens", "index")
_DTYPES: dict[str, Sequence[str]] = {
    "tokens": TOKEN_DTYPES,
    "index": ("uint64",),
    "stream": STREAM_DTYPES,
    "label": LABEL_DTYPES,
}


@dataclass(frozen=True)
class Section:
    """One array of the file. The first dimension of its shape counts tokens, samples, or samples + 1 (the index)."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    crc32: int

    @property
    def end(self) -> int:
        """Where the section ends in the file."""
        return self.offset + self.bytes


@dataclass(frozen=True)
class Header:
    """What a file says of itself: its sections by name, tokens and index among them, and facts for the user."""

    sections: dict[str, Section]
    meta: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens in the file."""
        return self.sections["tokens"].shape[0]

    @property
    def num_samples(self) -> int:
        """Samples in the file."""
        return self.sections["index"].shape[0] - 1

    def of_kind(self, kind: Kind) -> list[Section]:
        """Return the sections of a kind."""
        return [section for section in self.sections.values() if section.kind == kind]


def check_name(name: str) -> None:
    """Refuse a name that a stream or label cannot have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _SINGLE:
        raise DataError(f"a stream or label has a name of up to 64 letters, digits and _.-, found {name!r}")


def encode_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts as JSON gives them back; raises DataError if JSON cannot hold them."""
    try:
        result = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the meta of a token file must be plain JSON values ({error})") from error
    assert isinstance(result, dict)
    _vocab_size(result, "meta")
    return result


def encode_header(sections: Sequence[Section], meta: Mapping[str, Any]) -> bytes:
    """Return the header as JSON, the same bytes for the same contents."""
    content = {"meta": dict(meta), "sections": [asdict(section) for section in sections]}
    raw = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()
    if len(raw) > _MAX_HEADER:
        raise DataError(
            f"the meta of a token file is {len(raw):,} bytes of JSON; at most {_MAX_HEADER:,} are allowed"
        )
    return raw


def encode_preamble(header: bytes, offset: int) -> bytes:
    """Return the first 64 bytes of a file whose header, the last thing in it, lies at this offset."""
    raw = PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(header), offset, len(header), offset + len(header))
    return raw + struct.pack("<I", zlib.crc32(raw))


def read_header(read: Callable[[int, int], bytes], size: int, name: str) -> Header:
    """Return the header of a file of this size after checking all it says; `read` gives bytes from an offset.

    Raises DataError for a damaged, cut or newer file.
    """
    raw = read(0, PREAMBLE_BYTES)
    if len(raw) < PREAMBLE_BYTES:
        raise DataError(
            f"{name} is cut: it has {size:,} bytes, less than the first 64 of a token file; make it again"
        )
    _, version, crc, offset, header_bytes, file_bytes = PREAMBLE.unpack(raw[:60])
    if version == int.from_bytes(VERSION.to_bytes(4, "little"), "big"):
        raise DataError(f"{name} was written in big-endian byte order; token files are little-endian, write it again")
    if struct.unpack("<I", raw[60:64])[0] != zlib.crc32(raw[:60]):
        raise DataError(f"{name} is damaged: its first 64 bytes do not have their checksum; make or copy it again")
    if version != VERSION:
        raise DataError(f"{name} has version {version} of the token format, this etude reads {VERSION}; update etude")
    if size != file_bytes:
        problem = "cut" if size < file_bytes else "longer than it was written"
        raise DataError(f"{name} is {problem}: {size:,} bytes, expected {file_bytes:,}; make or copy it again")
    if not 0 < header_bytes <= _MAX_HEADER or offset < PREAMBLE_BYTES or offset + header_bytes > size:
        raise DataError(f"{name}: a header of {header_bytes:,} bytes at {offset:,} does not fit the file")
    raw = read(offset, header_bytes)
    if zlib.crc32(raw) != crc:
        raise DataError(f"{name} is damaged: its header does not have its checksum; make or copy it again")
    try:
        header = _checked(_decoded(raw))
        _check_shapes(header)
        _check_places(header, (offset, offset + header_bytes), size)
    except (DataError, RecursionError) as error:
        raise DataError(f"{name}: its header is wrong: {error}; fix the program that wrote it") from error
    return header


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON ({str(error)[:100]})") from error


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _checked(content: Any) -> Header:
    if not isinstance(content, dict) or not isinstance(content.get("sections"), list):
        raise DataError("it must be an object with a list of sections")
    meta = content.get("meta", {})
    if not isinstance(meta, dict):
        raise DataError(f"meta must be an object, found {_short(meta)}")
    _vocab_size(meta, "meta")
    sections: dict[str, Section] = {}
    for entry in content["sections"]:
        section = _section(entry)
        if section.name in sections:
            raise DataError(f"two sections are named {section.name!r}")
        sections[section.name] = section
    header = Header(sections, meta)
    for kind in _SINGLE:
        if [section.name for section in header.of_kind(kind)] != [kind]:
            raise DataError(f"it must have one section of kind {kind!r}, and that name")
    return header


def _section(entry: Any) -> Section:
    if not isinstance(entry, dict):
        raise DataError(f"a section must be an object, found {_short(entry)}")
    name, kind, dtype, shape = (entry.get(key) for key in ("name", "kind", "dtype", "shape"))
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise DataError(f"the kind of a section is one of {', '.join(_DTYPES)}, found {_short(kind)}")
    if not isinstance(name, str) or (name != kind if kind in _SINGLE else not _NAME.fullmatch(name)):
        raise DataError(f"a section of kind {kind} is named {_short(name)}")
    if not isinstance(dtype, str) or dtype not in _DTYPES[kind]:
        raise DataError(f"section {name!r} has dtype {_short(dtype)}; allowed are {', '.join(_DTYPES[kind])}")
    if not isinstance(shape, list) or not 1 <= len(shape) <= (2 if kind == "label" else 1) or shape[1:] == [0]:
        raise DataError(f"section {name!r} has shape {_short(shape)}")
    numbers = [*shape, *(entry.get(key) for key in ("offset", "bytes", "crc32"))]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise DataError(f"shape, offset, bytes and crc32 of section {name!r} must be whole numbers, not negative")
    *_, offset, size, crc = numbers
    expected = np.dtype(dtype).itemsize
    for number in shape:
        expected *= number
    if size != expected:
        raise DataError(f"section {name!r} of shape {shape} takes {expected:,} bytes, found {size:,}")
    return Section(name, kind, dtype, tuple(shape), offset, size, crc)  # type: ignore[arg-type]


def _check_shapes(header: Header) -> None:
    if header.num_samples < 0:
        raise DataError("the index has no entry; it has one more than there are samples")
    for section in header.sections.values():
        count = {"stream": header.num_tokens, "label": header.num_samples}.get(section.kind, section.shape[0])
        if section.shape[0] != count:
            raise DataError(f"section {section.name!r} has {section.shape[0]:,} entries, expected {count:,}")


def _check_places(header: Header, place: tuple[int, int], size: int) -> None:
    """Sections lie inside the file, aligned, and neither on each other nor on preamble and header."""
    places = [(0, PREAMBLE_BYTES, "the preamble"), (*place, "the header")]
    for section in header.sections.values():
        if section.offset % ALIGNMENT:
            raise DataError(f"section {section.name!r} begins at {section.offset:,}, not a multiple of {ALIGNMENT}")
        if section.bytes:
            places.append((section.offset, section.end, f"section {section.name!r}"))
        if section.end > size:
            raise DataError(f"section {section.name!r} ends at {section.end:,}, beyond the file's {size:,} bytes")
    places.sort()
    for (_, end, first), (start, _, second) in pairwise(places):
        if end > start:
            raise DataError(f"{first} and {second} overlap")


def _vocab_size(meta: Mapping[str, Any], where: str) -> None:
    size = meta.get("vocab_size")
    if size is not None and not (type(size) is int and 0 < size <= 2**32):
        raise DataError(f"vocab_size in {where} must be a whole number above 0, found {_short(size)}")


def _short(value: Any) -> str:
    return shorten(repr(value))
