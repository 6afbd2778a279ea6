"""open_tokens: token files of every known format, recognised by their first bytes."""

from functools import partial
from pathlib import Path

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import Label, TokenFile
from etude.data.tokens.foreign import INDEX_MAGIC, is_llmc, open_flat, open_llmc, open_megatron
from etude.data.tokens.layout import MAGIC, read_header
from etude.data.tokens.places import exists, is_remote, local_path
from etude.data.tokens.vectors import MappedFile

FORMATS = ("auto", "etude", "flat", "llm.c", "megatron")


def open_tokens(
    path: str | Path,
    *,
    format: str = "auto",
    dtype: str | None = None,
    document_end: int | None = None,
    document_start: int | None = None,
) -> TokenFile:
    """Open a token file, local or remote (any address that fsspec supports, such as s3://…; it is cached locally).

    `format` is "etude", "megatron" (either of the two files, or their common prefix), "llm.c", "flat" (only tokens of
    dtype `dtype`, as in nanoGPT) or "auto": detected by the first bytes, and flat if `dtype` is set. In flat and
    llm.c files `document_end` is an id that ends each document, or `document_start` one that begins each; without
    them the whole file is one document. Raises DataError if the file is missing, damaged, or something else.
    """
    name = str(path)
    if format not in FORMATS:
        raise DataError(f"the format of a token file must be one of {', '.join(FORMATS)}, found {format!r}")
    delimiter = document_start if document_end is None else document_end
    if document_end is not None and document_start is not None:
        raise DataError("document_end and document_start exclude each other; set only one")
    if delimiter is not None and (type(delimiter) is not int or not 0 <= delimiter < 2**32):
        raise DataError(f"document_end and document_start must be token ids, found {delimiter!r}")
    file = _open(name, format, dtype)
    if delimiter is not None:
        file.cut_documents(delimiter, begins=document_start is not None)
    file.reopen = partial(
        open_tokens,
        name if is_remote(name) else str(local_path(name).absolute()),
        format=format,
        dtype=dtype,
        document_end=document_end,
        document_start=document_start,
    )
    return file


def _open(name: str, format: str, dtype: str | None) -> TokenFile:
    if (pair := _pair(name, format)) is not None:
        return open_megatron(*map(MappedFile, pair))
    file = MappedFile(name)
    if not file.size:
        raise DataError(f"{name} is empty; create or copy it again")
    is_own = file.read(0, len(MAGIC)) == MAGIC
    if format == "llm.c" or (format == "auto" and is_llmc(file)):
        return open_llmc(file)
    if is_own or format == "etude":
        if format == "flat":
            raise DataError(f"{name} has a header with its dtype; remove format='flat'")
        return _open_native(file)
    if dtype is None:
        raise DataError(
            f"{name} is not a token file of etude, llm.c or Megatron; if it contains only tokens, set their dtype "
            "(uint16 for nanoGPT), else create or copy it again"
        )
    return open_flat(file, dtype)


def _pair(name: str, format: str) -> tuple[str, str] | None:
    """Return the two files of a Megatron data set, if it is one."""
    stem = name[:-4] if name.endswith((".bin", ".idx")) else name
    tokens, index = f"{stem}.bin", f"{stem}.idx"
    if format == "megatron" or name == index:
        return tokens, index
    if format != "auto" or not exists(index) or (name == stem and exists(name)):
        return None
    if name == tokens and MappedFile(tokens).read(0, len(MAGIC)) == MAGIC:
        return None  # an index of something else is beside it
    return (tokens, index) if MappedFile(index).read(0, len(INDEX_MAGIC)) == INDEX_MAGIC else None


def _open_native(file: MappedFile) -> TokenFile:
    """Open a file in etude's format; reads the header and two entries of the index."""
    sections, meta = read_header(file.read, file.size, file.name)
    vectors = {}
    for name, section in sections.items():
        dtype = "int64" if section.kind == "index" else section.dtype  # an offset above 2**63 appears negative
        vectors[name] = file.vector(section.offset, section.bytes // np.dtype(dtype).itemsize, dtype)
    tokens, index = vectors["tokens"], vectors["index"]
    if (found := (*index.slice(0, 1).tolist(), *index.slice(-1, index.count).tolist())) != (0, tokens.count):
        raise DataError(
            f"{file.name} is damaged: its samples go from {found[0]:,} to {found[1]:,}, its tokens from 0 to "
            f"{tokens.count:,}; create or copy it again"
        )
    return TokenFile(
        file.name,
        "etude",
        tokens,
        lambda: index,
        meta=meta,
        streams={name: vectors[name] for name, one in sections.items() if one.kind == "stream"},
        labels={
            name: Label(vectors[name], (*one.shape, None)[1]) for name, one in sections.items() if one.kind == "label"
        },
        checksums={name: (vectors[name], section.crc32) for name, section in sections.items()},
    )
