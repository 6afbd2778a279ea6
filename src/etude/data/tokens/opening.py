"""open_tokens: token files of every known format, recognised by how they begin."""

import codecs
import re
from functools import partial
from pathlib import Path

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens import megatron
from etude.data.tokens.file import Label, Offsets, TokenFile
from etude.data.tokens.flat import Delimiter, llmc_magic, open_flat, open_llmc
from etude.data.tokens.layout import MAGIC, read_header
from etude.data.tokens.places import exists, is_remote, local_path, open_storage
from etude.data.tokens.storage import Storage

FORMATS = ("auto", "etude", "flat", "llm.c", "megatron")

HEAD_BYTES, TAIL_BYTES = 4096, 65536
_OTHER_KINDS = {
    b"\x93NUMPY": "a NumPy .npy file",
    b"PK\x03\x04": "a zip archive (or a PyTorch file)",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x1f\x8b": "a gzip archive",
    b"MMIDIDX": "the .idx of a Megatron data set",
}
"""What is given by mistake most often, and might be named .bin."""
_TOKENS_SECTION = re.compile(rb'"kind"\s*:\s*"tokens"')
_CONTROL = re.compile(r"[\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")


def open_tokens(
    path: str | Path,
    *,
    format: str = "auto",
    dtype: str | None = None,
    document_end: int | None = None,
    document_start: int | None = None,
    memory_map: bool = True,
) -> TokenFile:
    """Open a token file, local or remote (any address that fsspec knows, such as s3://…).

    `format` is "etude", "megatron" (either of the two files, or what their names share), "llm.c", "flat" (nothing but
    tokens of type `dtype`, as nanoGPT has them; without it the ids decide between uint16, uint32 and int64) or "auto":
    found out from the file. In flat and llm.c files
    `document_end` is an id that ends each document, or `document_start` one that begins each; without them the whole
    file is one document. `memory_map=False` reads by system calls: slower, but nothing counts as memory of the process;
    that is done anyway if the file is larger than half of a memory limit of the process (`ulimit`).
    Raises DataError if the file is missing, damaged, or something else.
    """
    name = str(path)
    if format not in FORMATS:
        raise DataError(f"the format of a token file is one of {', '.join(FORMATS)}, found {format!r}")
    delimiter = _delimiter(document_end, document_start)
    file = _open(name, format, dtype, delimiter, memory_map)
    file.reopen = partial(
        open_tokens,
        name if is_remote(name) else str(local_path(name).absolute()),
        format=format,
        dtype=dtype,
        document_end=document_end,
        document_start=document_start,
        memory_map=memory_map,
    )
    return file


def _open(name: str, format: str, dtype: str | None, delimiter: Delimiter | None, memory_map: bool) -> TokenFile:
    if (pair := _pair(name, format)) is not None:
        _no_delimiter(name, "Megatron", delimiter)
        tokens, index = (open_storage(part, memory_map=memory_map) for part in pair)
        return megatron.open_megatron(tokens, index)
    storage = open_storage(name, memory_map=memory_map)
    if not storage.size:
        raise DataError(f"{name} is empty; make or copy it again")
    format = _recognise(storage) if format == "auto" else format
    if format == "llm.c":
        return open_llmc(storage, delimiter)
    if format == "flat":
        if storage.read(0, len(MAGIC)) == MAGIC:
            raise DataError(f"{name} has a header, and knows the type of its tokens; leave out format='flat'")
        return open_flat(storage, dtype, delimiter)
    _no_delimiter(name, "etude", delimiter)
    return _open_native(storage)


def _pair(name: str, format: str) -> tuple[str, str] | None:
    """Return the two files of a Megatron data set, if it is one."""
    stem = name[:-4] if name.endswith((".bin", ".idx")) else name
    tokens, index = f"{stem}.bin", f"{stem}.idx"
    if format == "megatron" or name == index:
        return tokens, index
    if format != "auto" or not exists(index) or (name == stem and exists(name)):
        return None
    if name == tokens and _head(tokens, 8).startswith(MAGIC):
        return None  # an index of something else lies beside it
    return (tokens, index) if _head(index, 9) == megatron.MAGIC else None


def _head(name: str, size: int) -> bytes:
    return open_storage(name, memory_map=False).read(0, size)


def _recognise(storage: Storage) -> str:
    head, name = storage.read(0, HEAD_BYTES), storage.name
    if head.startswith(MAGIC):
        return "etude"
    if llmc_magic(head) is not None:
        return "llm.c"
    if _was_native(head, storage.read(max(storage.size - TAIL_BYTES, 0), TAIL_BYTES)):
        raise DataError(f"{name} is damaged: it was a token file, but does not begin as one; make or copy it again")
    if (kind := _other_kind(head)) is not None:
        raise DataError(f"{name} is {kind}, not a token file; `etude tokenize` makes token files of text")
    if not name.endswith(".bin"):
        raise DataError(
            f"{name} is not a token file that is known here; if it holds nothing but tokens, open it with "
            "format='flat' and their dtype"
        )
    return "flat"


def _was_native(head: bytes, tail: bytes) -> bool:
    """Return whether a file was one of the project's own before its beginning was damaged, moved or lost."""
    alike = sum(found == known for found, known in zip(head, MAGIC, strict=False))
    return alike >= min(len(head), 4) or MAGIC in head or _TOKENS_SECTION.search(tail) is not None


def _other_kind(head: bytes) -> str | None:
    """Return in words what a file is that holds no tokens; None if nothing speaks against it."""
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 2**30:
        return "a safetensors file"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # which may be cut inside a character
        if len(head) >= 16 and not _CONTROL.search(text):
            return "a text file"
    except UnicodeDecodeError:
        pass
    return next((kind for magic, kind in _OTHER_KINDS.items() if head.startswith(magic)), None)


def _delimiter(document_end: int | None, document_start: int | None) -> Delimiter | None:
    if document_end is not None and document_start is not None:
        raise DataError("documents have either a document_end or a document_start; give one of the two")
    value = document_start if document_end is None else document_end
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**32:
        raise DataError(f"document_end and document_start are token ids, found {value!r}")
    return Delimiter(value, begins=document_start is not None)


def _no_delimiter(name: str, kind: str, delimiter: Delimiter | None) -> None:
    if delimiter is not None:
        raise DataError(f"{name} is a file of {kind} format, which knows its documents; leave out {delimiter.option}")


def _open_native(storage: Storage) -> TokenFile:
    """Open a file of the project's own format; reads the header and two entries of the index."""
    header = read_header(storage.read, storage.size, storage.name)
    vectors = {}
    for name, section in header.sections.items():
        dtype = "int64" if section.kind == "index" else section.dtype  # an offset above 2**63 is found to be negative
        vectors[name] = storage.vector(section.offset, section.bytes // np.dtype(dtype).itemsize, dtype)
    first, last = vectors["index"].take(np.array([0, header.num_samples])).tolist()
    if (first, last) != (0, header.num_tokens):
        raise DataError(
            f"{storage.name} is damaged: its samples go from {first:,} to {last:,}, its tokens from 0 to "
            f"{header.num_tokens:,}; make or copy it again"
        )
    boundaries = Offsets(vectors["index"])
    return TokenFile(
        storage.name,
        "etude",
        vectors["tokens"],
        lambda: boundaries,
        meta=header.meta,
        streams={one.name: vectors[one.name] for one in header.of_kind("stream")},
        labels={one.name: Label(vectors[one.name], (*one.shape, None)[1]) for one in header.of_kind("label")},
        checksums={name: (vectors[name], section.crc32) for name, section in header.sections.items()},
    )
