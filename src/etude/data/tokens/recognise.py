"""Recognising files by how they begin: token files, damaged ones, and files of other kinds."""

import re

from etude.data.tokens.layout import MAGIC

HEAD_BYTES = 4096
TAIL_BYTES = 65536

_KINDS = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a zip archive (or a PyTorch file)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x93NUMPY", "a NumPy .npy file"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF model"),
    (b"\x7fELF", "a program"),
    (b"SQLite format", "an SQLite database"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"MMIDIDX", "the .idx of a Megatron data set"),
)
_TOKENS_SECTION = re.compile(rb'"kind"\s*:\s*"tokens"')
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\f\x1b")) + b"\x7f"


def damaged_native(head: bytes, tail: bytes) -> bool:
    """Return whether a file was one of the project's own before its beginning was damaged, moved or lost."""
    alike = sum(found == known for found, known in zip(head, MAGIC, strict=False))
    return alike >= min(len(head), 4) or MAGIC in head or _TOKENS_SECTION.search(tail) is not None


def other_kind(head: bytes) -> str | None:
    """Return in words what a file is that holds no tokens; None if nothing speaks against it.

    >>> other_kind(b"PK\\x03\\x04....")
    'a zip archive (or a PyTorch file)'
    >>> other_kind(b"Once upon a time, there was a file of text.")
    'a text file'
    """
    for magic, words in _KINDS:
        if head.startswith(magic):
            return words
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 2**30:
        return "a safetensors file"
    return "a text file" if len(head) >= 16 and _is_text(head) else None


def _is_text(head: bytes) -> bool:
    if head.translate(None, _CONTROL) != head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and error.reason == "unexpected end of data"  # cut inside a character
    return True
