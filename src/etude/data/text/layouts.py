"""Which parts of which documents make up a packed block: by splitting the file, or by fitting whole documents."""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order.permutation import Indices, KeyedPermutation
from etude.data.text.padding import Mask, ranges
from etude.data.tokens.file import TokenFile


class Pieces(NamedTuple):
    """Spans of the file that make up blocks, block after block."""

    starts: Indices
    lengths: Indices
    counts: Indices
    """Parts in each block."""
    ends: Mask
    """Which parts end with their document; the others continue in another block."""


class SplitLayout:
    """All documents in order, split every `length` tokens. Nothing is stored: boundaries are looked up.

    `num_padding` is the number of padding positions in all blocks together.
    """

    def __init__(self, file: TokenFile, length: int, *, pad_last: bool) -> None:
        self._file, self._length = file, length
        full, rest = divmod(file.num_tokens, length)
        padded = pad_last and rest > 0
        self.num_blocks = full + padded
        self.num_padding = length - rest if padded else 0

    def pieces(self, blocks: Indices) -> Pieces:
        """Find the documents at both ends of each block, then all boundaries between them."""
        begin = blocks * self._length
        end = np.minimum(begin + self._length, self._file.num_tokens)
        both = self._file.document_at(np.concatenate([begin, end - 1]))
        first, last = both[: len(blocks)], both[len(blocks) :]
        counts = last - first + 1
        starts, lengths = self._file.spans(ranges(first, counts))
        stops = starts + lengths
        num_tokens = int((end - begin).sum())
        begin, end = np.repeat(begin, counts), np.repeat(end, counts)
        ends = stops <= end
        np.maximum(starts, begin, out=starts)
        lengths = np.minimum(stops, end) - starts
        if int(lengths.sum()) != num_tokens:
            raise DataError(f"the documents of {self._file.path} are not contiguous; use strategy='fit'")
        if lengths.size and int(lengths.min()) < 1:  # empty documents between others
            real = lengths > 0
            rows = np.repeat(np.arange(len(blocks)), counts)
            counts = np.bincount(rows[real], minlength=len(blocks))
            starts, lengths, ends = starts[real], lengths[real], ends[real]
        return Pieces(starts, lengths, counts, ends)

    def most_pieces(self) -> int:
        """Scan all blocks, a million at a time; empty documents count, and so do both ends of a block."""
        most, step = 0, 2**20
        for first in range(0, self.num_blocks, step):
            borders = np.arange(first, min(first + step, self.num_blocks) + 1) * self._length
            documents = self._file.document_at(np.minimum(borders, self._file.num_tokens - 1))
            most = max(most, int(np.diff(documents).max()) + 1)
        return most


class FitLayout:
    """Documents in blocks of `length` with as little padding as possible; only longer ones are split.

    Takes 13 bytes per document (or part of one) and 8 per block, and about five times that during construction.
    """

    def __init__(self, file: TokenFile, length: int, *, seed: int) -> None:
        starts, lengths, ends = _cut(file, length)
        order = _by_length(lengths, seed)
        counts = np.bincount(lengths, minlength=length + 1)
        blocks, self.num_blocks = best_fit(counts, length)
        order = order[np.argsort(blocks, kind="stable")]
        self._starts, self._ends = starts[order], ends[order]
        self._lengths = lengths[order].astype(np.int32)
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(blocks, minlength=self.num_blocks))])
        self.num_padding = self.num_blocks * length - int(lengths.sum())

    def pieces(self, blocks: Indices) -> Pieces:
        """Look up the parts in the table."""
        first = self._offsets[blocks]
        counts = self._offsets[blocks + 1] - first
        places = ranges(first, counts)
        return Pieces(self._starts[places], self._lengths[places].astype(np.int64), counts, self._ends[places])

    def most_pieces(self) -> int:
        """Scan the table."""
        return int(np.diff(self._offsets).max())


def _cut(file: TokenFile, length: int) -> tuple[Indices, Indices, Mask]:
    """Starts and lengths of all documents, those longer than `length` in parts, and which parts are the last."""
    step = 2**20
    numbers = [np.arange(first, min(first + step, len(file))) for first in range(0, len(file), step)]
    spans = [file.spans(part) for part in numbers]
    starts = np.concatenate([part[0] for part in spans]) if spans else np.empty(0, np.int64)
    lengths = np.concatenate([part[1] for part in spans]) if spans else np.empty(0, np.int64)
    del spans
    pieces = -(-lengths // length)
    within = ranges(np.zeros_like(pieces), pieces)
    skipped = within * length
    rest = np.repeat(lengths, pieces) - skipped
    return np.repeat(starts, pieces) + skipped, np.minimum(rest, length), rest <= length


def _by_length(lengths: Indices, seed: int) -> Indices:
    """Parts from the longest to the shortest; those of one length in a keyed order, to separate neighbours."""
    order = KeyedPermutation(len(lengths), mix(seed, 5)).indices(0, len(lengths))
    shuffled = lengths[order]
    longest = int(shuffled.max()) if shuffled.size else 0
    kind = np.uint16 if longest < 2**16 else np.uint64  # 16-bit numbers are sorted by radix sort
    return order[np.argsort((longest - shuffled).astype(kind), kind="stable")]


def best_fit(counts: Indices, capacity: int) -> tuple[Indices, int]:
    """Pack `counts[l]` parts of each length l into blocks; return the block of each part, and the number of blocks.

    Parts are numbered from the longest to the shortest. Each goes into the fullest block with enough space. Parts of
    one length, and blocks with the same space left, are interchangeable, so whole groups are moved at once: the
    number of moves depends on the number of distinct lengths (at most about capacity·log(capacity)), not on that of
    parts.

    >>> blocks, number = best_fit(np.array([0, 2, 1, 0, 1, 0, 1]), capacity=8)  # lengths 6 4 2 1 1
    >>> blocks.tolist(), number
    ([0, 1, 0, 1, 1], 2)
    """
    room = _Room()
    parts: list[Indices] = []
    num_blocks = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            found = room.tightest(length)
            if found is None:
                needed = -(-left // (capacity // length))
                room.add(capacity, np.arange(num_blocks, num_blocks + needed))
                num_blocks += needed
                continue
            # The fullest block takes as many as it can before the next one is started.
            fit = found // length
            if left < fit:
                block = room.take(found, 1)
                room.add(found - left * length, block)
                parts.append(np.repeat(block, left))
                break
            blocks = room.take(found, left // fit)
            room.add(found % length, blocks)
            parts.append(np.repeat(blocks, fit))
            left -= len(blocks) * fit
    return (np.concatenate(parts) if parts else np.empty(0, np.int64)), num_blocks


class _Room:
    """Blocks by the space left in them."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Indices]] = {}
        self._sizes: list[int] = []

    def tightest(self, length: int) -> int | None:
        """The smallest sufficient space for `length`, or None if no block has that much."""
        place = bisect_left(self._sizes, length)
        return self._sizes[place] if place < len(self._sizes) else None

    def add(self, size: int, blocks: Indices) -> None:
        """Add blocks with `size` left; full ones are dropped."""
        if size == 0:
            return
        if size not in self._blocks:
            self._blocks[size] = []
            insort(self._sizes, size)
        self._blocks[size].append(blocks)

    def take(self, size: int, limit: int) -> Indices:
        """Remove some blocks with `size` left, at most `limit`."""
        groups = self._blocks[size]
        blocks = groups.pop()
        if len(blocks) > limit:
            groups.append(blocks[limit:])
        if not groups:
            del self._blocks[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return blocks[:limit]
