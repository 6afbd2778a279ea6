"""Best-fit decreasing: pieces of given lengths into as few blocks as possible, without cutting them."""

from bisect import bisect_left, insort

import numpy as np

from etude.data.order import Indices


def best_fit(counts: Indices, capacity: int) -> tuple[Indices, int]:
    """Pack `counts[l]` pieces of each length l into blocks; return the block of each piece, and how many there are.

    Pieces are numbered from the longest to the shortest. Each goes into the fullest block that has room for it. Pieces
    of one length, and blocks with the same room left, are alike, so whole groups are moved at once: the number of
    moves depends on the number of different lengths (about capacity·log(capacity) at most), not on that of pieces.

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
            # The fullest block takes as many as it can before the next one is begun.
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
    """Blocks by the room that is left in them."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Indices]] = {}
        self._sizes: list[int] = []

    def tightest(self, length: int) -> int | None:
        """The least room that is enough for `length`, or None if no block has that much."""
        place = bisect_left(self._sizes, length)
        return self._sizes[place] if place < len(self._sizes) else None

    def add(self, size: int, blocks: Indices) -> None:
        """Put blocks among those with `size` left; full ones are forgotten."""
        if size == 0:
            return
        if size not in self._blocks:
            self._blocks[size] = []
            insort(self._sizes, size)
        self._blocks[size].append(blocks)

    def take(self, size: int, limit: int) -> Indices:
        """Take out some blocks with `size` left, at most `limit`."""
        groups = self._blocks[size]
        blocks = groups.pop()
        if len(blocks) > limit:
            groups.append(blocks[limit:])
        if not groups:
            del self._blocks[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return blocks[:limit]
