"""open_tokens: token files of every known format, recognised by what they hold."""

from functools import partial
from pathlib import Path

from etude.core.errors import DataError
from etude.data.tokens import megatron
from etude.data.tokens.file import TokenFile
from etude.data.tokens.flat import Delimiter, llmc_magic, open_flat, open_llmc
from etude.data.tokens.layout import MAGIC
from etude.data.tokens.native import open_native
from etude.data.tokens.places import exists, is_remote, local_path, open_storage
from etude.data.tokens.recognise import HEAD_BYTES, TAIL_BYTES, damaged_native, other_kind
from etude.data.tokens.storage import Storage

FORMATS = ("auto", "etude", "flat", "llm.c", "megatron")


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
    place = name if is_remote(name) else str(local_path(name).absolute())
    reopen = partial(
        open_tokens,
        place,
        format=format,
        dtype=dtype,
        document_end=document_end,
        document_start=document_start,
        memory_map=memory_map,
    )
    if (pair := _pair(name, format)) is not None:
        _no_delimiter(name, "Megatron", delimiter)
        tokens, index = (open_storage(part, memory_map=memory_map) for part in pair)
        return megatron.open_megatron(tokens, index, reopen)
    storage = open_storage(name, memory_map=memory_map)
    if not storage.size:
        raise DataError(f"{name} is empty; make or copy it again")
    format = _recognise(storage) if format == "auto" else format
    if format == "llm.c":
        return open_llmc(storage, delimiter, reopen)
    if format == "flat":
        if storage.read(0, len(MAGIC)) == MAGIC:
            raise DataError(f"{name} has a header, and knows the type of its tokens; leave out format='flat'")
        return open_flat(storage, dtype, delimiter, reopen)
    _no_delimiter(name, "etude", delimiter)
    return open_native(storage, reopen)


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
    if damaged_native(head, storage.read(max(storage.size - TAIL_BYTES, 0), TAIL_BYTES)):
        raise DataError(f"{name} is damaged: it was a token file, but does not begin as one; make or copy it again")
    if (kind := other_kind(head)) is not None:
        raise DataError(f"{name} is {kind}, not a token file; `etude tokenize` makes token files of text")
    if not name.endswith(".bin"):
        raise DataError(
            f"{name} is not a token file that is known here; if it holds nothing but tokens, open it with "
            "format='flat' and their dtype"
        )
    return "flat"


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
