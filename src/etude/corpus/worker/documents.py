"""The documents of text and JSONL files, and their digests."""

import gzip
import hashlib
import json
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from etude.core.errors import DataError

HEAD_BYTES = 8192
"""Where a zero byte tells that a file is not text."""


class Skip(Exception):
    """A file that is passed over; says why."""


def digests(text: str, raw: bytes, salt: str) -> tuple[int, int, int]:
    """Return 128 bits of the normalised content, which decide split and order, and 64 bits of the exact content.

    Normalised means: one kind of line end, no white space at line ends or around the text, composed characters. So
    copies that differ in nothing a reader would see have one digest.
    """
    lines = "\n".join(map(str.rstrip, unicodedata.normalize("NFC", text).splitlines())).strip()
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    high, low = struct.unpack(">QQ", hashlib.blake2b(lines.encode(), digest_size=16, key=key).digest())
    return high, low, int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def cut_at_lines(file: IO[str], max_chars: int) -> Iterator[str]:
    """Cut a text at line ends into pieces of at most `max_chars`; a longer line is cut where it must be.

    >>> from io import StringIO
    >>> list(cut_at_lines(StringIO("one\\ntwo\\nthree\\nabcdefghijkl"), 10))
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


def text_documents(path: str, packed: bool, cut_chars: int | None) -> Iterator[tuple[int, str]]:
    """Yield the documents of a text file with the byte each begins at: the whole file, or pieces of it."""
    opener: Callable[..., Any] = gzip.open if packed else open
    try:
        with opener(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        if b"\0" in head:
            raise Skip("binary")
        offset = 3 if head.startswith(b"\xef\xbb\xbf") else 0
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            file.read(offset // 3)  # the byte order mark is one character
            for text in cut_at_lines(file, cut_chars) if cut_chars else [file.read()]:
                yield offset, text
                offset += len(text.encode())
    except UnicodeDecodeError:
        raise Skip("not UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a readable gzip file ({error}); replace or exclude it") from None
    except OSError:
        raise Skip("unreadable") from None


def json_documents(path: str, packed: bool, start: int, stop: int, key: str) -> Iterator[tuple[int, int, str]]:
    """Yield offset, size and text of the lines of a JSONL file that begin in the bytes from `start` to `stop`."""
    opener: Callable[..., Any] = gzip.open if packed else open
    try:
        with opener(path, "rb") as file:
            offset = start
            if start:
                file.seek(start - 1)
                offset += len(file.readline()) - 1  # the line that holds this byte began before
            while offset < stop and (line := file.readline()):
                if line.strip():
                    yield offset, len(line), json_text(path, offset, line, key, packed)
                offset += len(line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a readable gzip file ({error}); replace or exclude it") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def json_text(path: str, offset: int, line: bytes, key: str, packed: bool = False) -> str:
    """Return the text of one line of JSONL; null counts as an empty text."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_line(path, offset, packed)}: not a line of JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{_line(path, offset, packed)}: expected an object with key '{key}', got {_kind(record)}")
    if key not in record:
        keys = ", ".join(list(map(str, record))[:8]) or "none"
        raise DataError(f"{_line(path, offset, packed)}: no key '{key}' (keys: {keys}); name it with --text-key")
    text = record[key]
    if not isinstance(text, str | None):
        raise DataError(f"{_line(path, offset, packed)}: '{key}' must be a string, got {_kind(text)}")
    return text or ""


def _kind(value: object) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _line(path: str, offset: int, packed: bool) -> str:
    """Name the line that begins at a byte, as editors count."""
    with (gzip.open if packed else open)(path, "rb") as file:
        number, left = 1, offset
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            number += piece.count(b"\n")
            left -= len(piece)
    return f"{path}:{number}"
