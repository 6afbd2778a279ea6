"""Opening files that are nothing but tokens (nanoGPT's habit), and those of llm.c: the same after a short header."""

import struct
from dataclasses import dataclass

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import Offsets, TokenFile
from etude.data.tokens.storage import Storage
from etude.data.tokens.vectors import ArrayVector, Ints, Vector, chunks

FLAT_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")

LLMC_BYTES = 1024
"""An llm.c file begins with 256 int32: magic, version, number of tokens, zeros."""
LLMC_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Version and type of the tokens by magic: GPT-2's vocabulary and Llama 3's."""
LLMC_OTHERS = {20240326: "model", 20240327: "debug state", 20240328: "tokenizer", 20240522: "evaluation"}


@dataclass(frozen=True)
class Delimiter:
    """The id that ends each document, or begins each."""

    id: int
    begins: bool = False

    @property
    def option(self) -> str:
        """What the user calls it."""
        return "document_start" if self.begins else "document_end"


SAMPLE_BYTES = 2**16
"""What is read of a flat file, at either end, to see how wide its ids are."""
SURE = 64
"""Ids from which on a pattern in their bytes is none by chance."""
MAX_HIGH = 16
"""Upper halves of 32-bit ids are below this: no vocabulary has more than 2**20 tokens."""


def open_flat(storage: Storage, dtype: str | None, delimiter: Delimiter | None) -> TokenFile:
    """Open a file of nothing but tokens; without a `dtype` its ids decide."""
    dtype = flat_dtype(storage) if dtype is None else dtype
    if dtype not in FLAT_DTYPES:
        raise DataError(f"the dtype of a headerless token file is one of {', '.join(FLAT_DTYPES)}, found {dtype!r}")
    size = np.dtype(dtype).itemsize
    if storage.size % size:
        raise DataError(f"{storage.name} has {storage.size:,} bytes, not a multiple of the {size} that {dtype} takes")
    return _flat(storage, "flat", storage.vector(0, storage.size // size, dtype), delimiter)


def flat_dtype(storage: Storage) -> str:
    """Return the type of the tokens in a flat file: uint16, unless the words of 16 bits show that ids are wider.

    The upper halves of wider ids are all zero or small, and the lower halves are not. Raises DataError if there are too
    few ids to be sure.
    """
    start = max(0, storage.size - SAMPLE_BYTES) // 8 * 8
    for size, dtype in ((8, "int64"), (4, "uint32")):
        if storage.size % size:
            continue
        parts = [storage.read(place, SAMPLE_BYTES) for place in {0, start}]
        words = np.concatenate([np.frombuffer(part[: len(part) // size * size], "<u2") for part in parts])
        low, *high = words.reshape(-1, size // 2).T
        if not low.any() or any(half.max() >= (MAX_HIGH if place == 0 else 1) for place, half in enumerate(high)):
            continue
        has_high = any(half.any() for half in high)
        if has_high and (low.max() < MAX_HIGH or len(low) < SURE):
            continue  # small numbers everywhere: a small vocabulary
        if len(low) < SURE:
            raise DataError(
                f"{storage.name} has too few tokens to see whether they are uint16 or {dtype}; give their dtype"
            )
        return dtype
    return "uint16"


def llmc_magic(head: bytes) -> int | None:
    """Return the first number of a file if it is one of llm.c's, in either byte order."""
    for order in "<>":
        if len(head) >= 4 and (magic := struct.unpack(f"{order}i", head[:4])[0]) in LLMC_KINDS.keys() | LLMC_OTHERS:
            return int(magic)
    return None


def open_llmc(storage: Storage, delimiter: Delimiter | None) -> TokenFile:
    """Open a token file of llm.c."""
    head = storage.read(0, LLMC_BYTES)
    magic = llmc_magic(head)
    if magic is None:
        raise DataError(f"{storage.name} does not begin with the magic number of an llm.c token file")
    if struct.unpack("<i", head[:4])[0] != magic:
        raise DataError(f"{storage.name} is an llm.c file in big-endian byte order; write it again as little-endian")
    if magic in LLMC_OTHERS:
        raise DataError(f"{storage.name} is an llm.c {LLMC_OTHERS[magic]} file, not one of tokens")
    if len(head) < LLMC_BYTES:
        raise DataError(f"{storage.name} is cut: {storage.size:,} bytes, an llm.c header has {LLMC_BYTES:,}")
    version, count = struct.unpack("<4xiI", head[:12])
    expected, dtype = LLMC_KINDS[magic]
    if version != expected:
        raise DataError(
            f"{storage.name} is an llm.c file of version {version}; {expected} is known for its magic number"
        )
    found = LLMC_BYTES + count * np.dtype(dtype).itemsize
    if storage.size != found:
        problem = "cut" if storage.size < found else "too long"
        raise DataError(f"{storage.name} is {problem}: {count:,} tokens take {found:,} bytes, found {storage.size:,}")
    return _flat(storage, "llm.c", storage.vector(LLMC_BYTES, count, dtype), delimiter)


def _flat(storage: Storage, format: str, tokens: Vector, delimiter: Delimiter | None) -> TokenFile:
    def find_boundaries() -> Offsets:
        if delimiter is not None:
            return Offsets(ArrayVector(storage.name, scan(storage.name, tokens, delimiter)))
        return Offsets(ArrayVector(storage.name, np.unique([0, tokens.count])))

    return TokenFile(storage.name, format, tokens, find_boundaries, has_documents=delimiter is not None)


def scan(name: str, tokens: Vector, delimiter: Delimiter) -> Ints:
    """Return the offsets of documents, found by going through all tokens once, in constant memory but for them."""
    found = []
    for position, values in chunks(tokens):
        found.append(np.flatnonzero(values == delimiter.id) + position)
    ends = np.concatenate(found) if found else np.empty(0, np.int64)
    if not ends.size and tokens.count:
        raise DataError(
            f"{name}: the id {delimiter.id} does not occur in it, so that it is one document; give another "
            f"{delimiter.option}, or none"
        )
    return np.unique(np.concatenate([[0], ends if delimiter.begins else ends + 1, [tokens.count]])).astype(np.int64)
