"""Token files of other tools: flat ones (nanoGPT), llm.c, and Megatron's pairs of .bin and .idx."""

import struct
from itertools import pairwise

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import TokenFile
from etude.data.tokens.vectors import Ints, MappedFile, Vector

FLAT_DTYPES = ("uint8", "int8", "int16", "uint16", "uint32", "int32", "int64")

LLMC_BYTES = 1024
"""An llm.c file begins with 256 int32: magic, version, number of tokens, zeros."""
LLMC_KINDS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Dtype of the tokens by magic and version: GPT-2's vocabulary and Llama 3's."""

INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document indices (documents + 1)."""
_INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def open_flat(file: MappedFile, dtype: str) -> TokenFile:
    """Open a file that contains only tokens."""
    if dtype not in FLAT_DTYPES:
        raise DataError(
            f"the dtype of a headerless token file must be one of {', '.join(FLAT_DTYPES)}, found {dtype!r}"
        )
    size = np.dtype(dtype).itemsize
    if file.size % size:
        raise DataError(f"{file.name} has {file.size:,} bytes, not a multiple of the {size} that {dtype} takes")
    return TokenFile(file.name, "flat", file.vector(0, file.size // size, dtype))


def is_llmc(file: MappedFile) -> bool:
    """Return whether a file begins with the magic number of llm.c's token files."""
    head = file.read(0, 4)
    return any(head == struct.pack("<i", magic) for magic, _ in LLMC_KINDS)


def open_llmc(file: MappedFile) -> TokenFile:
    """Open a token file of llm.c."""
    magic, version, count = struct.unpack("<iiI", file.read(0, 12).ljust(12, b"\0"))
    dtype = LLMC_KINDS.get((magic, version))
    if dtype is None:
        raise DataError(f"{file.name} begins with {magic} and version {version}, which no llm.c token file does")
    expected = LLMC_BYTES + count * np.dtype(dtype).itemsize
    if file.size != expected:
        problem = "cut" if file.size < expected else "too long"
        raise DataError(f"{file.name} is {problem}: {count:,} tokens take {expected:,} bytes, found {file.size:,}")
    return TokenFile(file.name, "llm.c", file.vector(LLMC_BYTES, count, dtype))


def open_megatron(tokens: MappedFile, index: MappedFile) -> TokenFile:
    """Open a pair of files. A sample is a document; document starts are held in memory, 8 bytes each."""
    head = index.read(0, _INDEX_HEAD.size).ljust(_INDEX_HEAD.size, b"\0")
    magic, version, code, sequences, entries = _INDEX_HEAD.unpack(head)
    dtype = _INDEX_DTYPES.get(code)
    if magic != INDEX_MAGIC or version != 1 or dtype is None:
        raise DataError(f"{index.name} is damaged, or no index of a Megatron data set of version 1 with integers")
    expected = _INDEX_HEAD.size + 12 * sequences + 8 * entries
    if index.size not in (expected, expected + sequences):  # multimodal data has a byte per sequence at the end
        raise DataError(
            f"{index.name} is damaged: its {sequences:,} sequences and {entries:,} document indices take "
            f"{expected:,} bytes, found {index.size:,}; make or copy it again"
        )
    vector = open_flat(tokens, dtype).vectors[None]
    documents = _documents(index, sequences, entries, vector)
    return TokenFile(tokens.name, "megatron", vector, lambda: documents)


def _documents(index: MappedFile, sequences: int, entries: int, tokens: Vector) -> Vector:
    """Return the offsets of documents: each is the sequences from one document index to the next."""
    sizes = (4 * sequences, 8 * sequences, 8 * entries)
    places = pairwise(np.cumsum([_INDEX_HEAD.size, *sizes]).tolist())
    lengths, pointers, documents = (
        np.frombuffer(index.read(start, stop - start), kind)
        for (start, stop), kind in zip(places, ("<i4", "<i8", "<i8"), strict=True)
    )
    ends: Ints = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_whole = np.array_equal(pointers, ends[:-1] * tokens.dtype.itemsize) and not (lengths < 0).any()
    in_order = not (np.diff(documents) < 0).any() and (not entries or (documents[0], documents[-1]) == (0, sequences))
    if not is_whole or ends[-1] != tokens.count or not in_order:
        raise DataError(
            f"{index.name} is damaged: its documents do not contain all tokens of the .bin in order; create or copy "
            "both again"
        )
    return Vector(index.name, ends[documents] if entries else ends[:1])
