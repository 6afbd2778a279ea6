"""The documents of text and JSONL files: read once, hashed, and stored as plain text in one file."""

import gzip
import hashlib
import io
import json
import struct
import unicodedata
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import DataError
from etude.core.files import replacing
from etude.core.spelling import shorten
from etude.corpus.options import CorpusOptions
from etude.corpus.sources import SourceFile

HEAD_BYTES = 8192
"""Bytes that are searched for a zero byte, which shows that a file is not text."""

LOCATION = np.dtype([*((name, "<u8") for name in ("high", "low", "raw")), ("offset", "<i8"), ("size", "<i8")])
"""A document: its digest (of the normalised content, high and low), a digest of its very bytes, and where these lie:
the first byte in the file of all texts, and how many there are."""

Locations = NDArray[Any]


class Skip(Exception):
    """A file that is skipped, with the reason."""


def scan(
    sources: Sequence[SourceFile], options: CorpusOptions, texts: Path, progress: Callable[[int], None]
) -> tuple[Locations, Counter[str]]:
    """Write the documents of all files to one, `texts`; return their locations, and how many were skipped."""
    rows, skipped, num_bytes = array("Q"), Counter[str](), 0
    with replacing(texts) as file:
        for source in sources:
            before, place = len(rows), file.tell()
            try:
                for text in documents(source, options):
                    if reason := _unwanted(text, options):
                        skipped[reason] += 1
                        continue
                    raw = text.encode()
                    rows.extend((*digests(text, raw, options.salt), file.tell(), len(raw)))
                    file.write(raw)
            except Skip as reason:  # all documents of a file or none
                del rows[before:]
                file.truncate(file.seek(place))
                skipped[str(reason)] += 1
            num_bytes += source.size
            progress(num_bytes)
    return np.frombuffer(rows, LOCATION), skipped


def read_texts(texts: Path, rows: Locations) -> list[str]:
    """Return scanned documents in the order of their locations."""
    found = [""] * len(rows)
    with texts.open("rb") as file:
        for place in np.argsort(rows["offset"]).tolist():  # in disk order
            file.seek(rows["offset"][place])
            found[place] = file.read(rows["size"][place]).decode()
    return found


def _unwanted(text: str, options: CorpusOptions) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can encode
        return "not valid Unicode"
    if not text or text.isspace():
        return "empty"
    if len(text) < options.min_chars:
        return "too short"
    return "too long" if options.max_chars is not None and len(text) > options.max_chars else ""


def digests(text: str, raw: bytes, salt: str) -> tuple[int, int, int]:
    """Return 128 bits of the normalised content, which determine split and order, and 64 bits of the exact content.

    Normalised means: one kind of line end, no white space at line ends or around the text, composed characters. So
    copies that look the same have the same digest.
    """
    lines = "\n".join(map(str.rstrip, unicodedata.normalize("NFC", text).splitlines())).strip()
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    high, low = struct.unpack(">QQ", hashlib.blake2b(lines.encode(), digest_size=16, key=key).digest())
    return high, low, int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def documents(source: SourceFile, options: CorpusOptions) -> Iterator[str]:
    """Yield the documents of a file: the whole text, parts of it, or one per line of JSON."""
    is_json = source.kind == "json"
    try:
        with _open(source) as file:
            for text in _json_texts(file, source, options.text_key) if is_json else [_decoded(file)]:
                pieces = cut_at_lines(text, options.cut_chars) if options.cut_chars else iter([text.read()])
                yield next(pieces, "")
                yield from pieces
    except UnicodeDecodeError:
        raise Skip("not UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{source.path} is not a readable gzip file ({error}); replace or exclude it") from None
    except OSError as error:
        if is_json:
            raise DataError(f"{source.path} cannot be read ({error.strerror})") from None
        raise Skip("unreadable") from None


def _open(source: SourceFile) -> IO[bytes]:
    path = Path(source.path)
    return cast("IO[bytes]", gzip.open(path)) if source.packed else path.open("rb")


def _decoded(file: IO[bytes]) -> IO[str]:
    """Return a text file as text, without a byte order mark."""
    if b"\0" in file.read(HEAD_BYTES):
        raise Skip("binary")
    file.seek(0)
    return io.TextIOWrapper(file, "utf-8-sig", newline="\n")


def cut_at_lines(file: IO[str], max_chars: int) -> Iterator[str]:
    """Split a text at line ends into parts of at most `max_chars`; a longer line is split inside.

    >>> list(cut_at_lines(io.StringIO("one\\ntwo\\nthree\\nabcdefghijkl"), 10))
    ['one\\ntwo\\n', 'three\\n', 'abcdefghij', 'kl']
    """
    held: list[str] = []
    chars = 0
    while line := file.readline(max_chars):
        if held and chars + len(line) > max_chars:
            yield "".join(held)
            held, chars = [], 0
        held.append(line)
        chars += len(line)
    if held:
        yield "".join(held)


def _json_texts(file: IO[bytes], source: SourceFile, key: str) -> Iterator[IO[str]]:
    """Yield the texts of the lines of a JSONL file."""
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield io.StringIO(_json_text(line, key), newline="\n")
            except (ValueError, RecursionError) as error:
                raise DataError(f"{source.path}:{number}: {error}") from None


def _json_text(line: bytes, key: str) -> str:
    """Return the text of one line of JSONL; null counts as an empty string."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with key '{key}', got {shorten(repr(record))}")
    if key not in record:
        keys = ", ".join(list(map(str, record))[:8]) or "none"
        raise ValueError(f"no key '{key}' (keys: {keys}); set it with --text-key")
    text = record[key]
    if not isinstance(text, str | None):
        raise ValueError(f"'{key}' must be a string, got {shorten(repr(text))}")
    return text or ""
