"""Opening Megatron's pairs of files: tokens in .bin, sequences and documents in .idx. A sample is a document."""

import struct

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import Offsets, TokenFile
from etude.data.tokens.storage import Storage
from etude.data.tokens.vectors import Ints, chunks, search

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, number of sequences, number of document indices (documents + 1)."""
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}

_BATCH = 2**18


class Documents(Offsets):
    """Documents of a Megatron index: each is the sequences from one document index to the next."""

    def __init__(self, index: Storage, sequences: int, entries: int, itemsize: int) -> None:
        self._name, self._itemsize = index.name, itemsize
        self.lengths = index.vector(_HEAD.size, sequences, "int32")
        self.pointers = index.vector(_HEAD.size + 4 * sequences, sequences, "int64")
        self.documents = index.vector(_HEAD.size + 12 * sequences, entries, "int64")
        self.count = max(entries - 1, 0)
        last = np.array([sequences - 1] if sequences else [], np.int64)
        self.end = int(np.sum(self.pointers.take(last) + self.lengths.take(last).astype(np.int64) * itemsize))
        """Where the last sequence ends, in bytes; the .bin ends there too."""

    def spans(self, indices: Ints) -> tuple[Ints, Ints]:
        """Look up the first and the last sequence of each document."""
        first, end = self.documents.pairs(indices)
        total = self.lengths.count
        if bool(np.any((first < 0) | (end < first) | (end > total))):
            self._damaged("a document has sequences that are not there")
        if not total:
            return np.zeros_like(first), np.zeros_like(first)
        starts = np.where(first < total, self._starts(np.minimum(first, total - 1)), self.end // self._itemsize)
        last = np.maximum(end - 1, 0)
        return starts, np.where(end > first, self._starts(last) + self.lengths.take(last), starts)

    def at(self, positions: Ints) -> Ints:
        """Search among the starts of the documents."""
        return search(lambda documents: self.spans(documents)[0], self.count, positions) - 1

    def forget(self) -> None:
        """Let go of the index."""
        self.documents.forget()

    def check(self) -> None:
        """Go through the whole index: sequences lie one after the other, and documents take them all in order."""
        expected, reached = 0, 0
        for (_, lengths), (_, pointers) in zip(
            chunks(self.lengths, size=_BATCH), chunks(self.pointers, size=_BATCH), strict=True
        ):
            ends = np.cumsum(lengths, dtype=np.int64) * self._itemsize + expected
            if int(lengths.min()) < 0 or not np.array_equal(pointers[1:], ends[:-1]) or int(pointers[0]) != expected:
                self._damaged("its sequences do not lie one after the other")
            expected = int(ends[-1])
        for _, documents in chunks(self.documents):
            if int(documents[0]) < reached or bool(np.any(documents[1:] < documents[:-1])):
                self._damaged("its documents are not in order")
            reached = int(documents[-1])
        if self.documents.count and (int(self.documents.take(np.array([0]))[0]), reached) != (0, self.lengths.count):
            self._damaged("its documents do not hold all sequences")

    def _starts(self, sequences: Ints) -> Ints:
        starts, rest = np.divmod(self.pointers.take(sequences), self._itemsize)
        if bool(np.any(rest)):
            self._damaged("a sequence begins inside a token")
        return starts

    def _damaged(self, why: str) -> None:
        raise DataError(f"{self._name} is damaged: {why}; make or copy it again")


def open_megatron(tokens: Storage, index: Storage) -> TokenFile:
    """Open a pair of files; reads the head of the index and its last entries."""
    head = index.read(0, _HEAD.size)
    if not head.startswith(MAGIC):
        raise DataError(f"{index.name} does not begin as the index of a Megatron data set does")
    if len(head) < _HEAD.size:
        raise DataError(f"{index.name} is cut: {index.size:,} bytes, its head alone has {_HEAD.size}; copy it again")
    _, version, code, sequences, entries = _HEAD.unpack(head)
    if version != 1:
        raise DataError(f"{index.name} has version {version} of Megatron's index; 1 is known")
    dtype = _DTYPES.get(code)
    if dtype is None or dtype.startswith("float"):
        raise DataError(f"{index.name} says its tokens are of type {dtype or code}; they must be whole numbers")
    expected = _HEAD.size + 12 * sequences + 8 * entries
    if index.size not in (expected, expected + sequences):  # multimodal data has a byte per sequence at the end
        raise DataError(
            f"{index.name} is damaged: {sequences:,} sequences and {entries:,} document indices take {expected:,} "
            f"bytes, found {index.size:,}; make or copy it again"
        )
    size = np.dtype(dtype).itemsize
    documents = Documents(index, sequences, entries, size)
    if documents.end != tokens.size:
        raise DataError(
            f"{tokens.name} has {tokens.size:,} bytes, but its index {index.name} ends at {documents.end:,}; one of "
            "the two is cut, or they do not belong together"
        )
    return TokenFile(tokens.name, "megatron", tokens.vector(0, tokens.size // size, dtype), lambda: documents)
