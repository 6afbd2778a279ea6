"""Metrics in bounded memory: the lowest, highest and last value of consecutive records, at every zoom.

Short runs keep every record. When a run has more records than `most`, neighbours are merged into blocks of two, four,
eight …; a spike stays in the minimum or maximum of its block.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MOST_BLOCKS = 8192
LEAST_BLOCKS = 512
MOST_NAMES = 2000
"""Metrics of one split that are kept."""
_FIRST = 64


@dataclass(slots=True)
class Points:
    """Points of one metric in order: where they are, lowest, highest and last value; `bad` marks NaN and infinity."""

    x: Array
    low: Array
    high: Array
    last: Array
    bad: Flags

    def at(self, index: Any) -> "Points":
        """Return some of the points."""
        return Points(self.x[..., index], self.low[index], self.high[index], self.last[index], self.bad[index])

    def placed(self, x: Array) -> "Points":
        """Return the points at other places, in the order of those; points without a place are dropped."""
        found = Points(x, self.low, self.high, self.last, self.bad)
        if not np.isfinite(x).all():
            found = found.at(np.isfinite(x))
        return found if (np.diff(found.x) >= 0).all() else found.at(np.argsort(found.x, kind="stable"))

    def between(self, start: float | None, end: float | None) -> "Points":
        """Return the points from `start` to `end`, and one more on either side, where a line leaves the chart."""
        first = 0 if start is None else max(0, int(np.searchsorted(self.x, start)) - 1)
        after = len(self.x) if end is None else int(np.searchsorted(self.x, end, side="right")) + 1
        return self.at(slice(first, after))

    def bucketed(self, pixels: int) -> "Points":
        """Return at most `pixels` points: equal parts of the range, each with its lowest, highest and last value."""
        if len(self.x) <= pixels:
            return self
        begin, width = self.x[0], self.x[-1] - self.x[0]
        if width > 0:
            bucket = np.minimum(((self.x - begin) / width * pixels).astype(np.int64), pixels - 1)
            starts = np.concatenate([[0], np.flatnonzero(np.diff(bucket)) + 1])
        else:
            starts = np.zeros(1, np.int64)
        ends = np.concatenate([starts[1:], [len(self.x)]]) - 1
        return Points(
            self.x[ends],
            np.fmin.reduceat(self.low, starts),
            np.fmax.reduceat(self.high, starts),
            self.last[ends],
            np.logical_or.reduceat(self.bad, starts),
        )


class Blocks:
    """Growing records of one split: `add` takes raw values, `points` returns those of a metric.

    >>> blocks = Blocks(axes=1, most=2)
    >>> blocks.add(np.arange(5.0)[None], ["loss"], np.array([[3.0, 9.0, 2.0, 1.0, np.inf]]))
    >>> points = blocks.points("loss")
    >>> points.x[0].tolist(), points.low.tolist(), points.high.tolist(), points.last.tolist()
    ([1.0, 3.0, 4.0], [3.0, 1.0, nan], [9.0, 2.0, nan], [9.0, 1.0, nan])
    """

    def __init__(self, axes: int, most: int = MOST_BLOCKS) -> None:
        self.most = most
        """Blocks after which neighbours are merged; even."""
        self.per_block = 1
        """Records in a block."""
        self.total: dict[str, int] = {}
        """Number of values by name."""
        self._rows: dict[str, int] = {}
        self._size = 0
        self._x = np.empty((axes, _FIRST))
        self._values = np.empty((3, 0, _FIRST))  # lowest, highest, last
        self._bad = np.empty((0, _FIRST), np.bool_)
        self._rest_x = np.empty((axes, 0))
        self._rest = np.empty((0, 0))

    @property
    def names(self) -> list[str]:
        """The metrics, in the order in which they were seen."""
        return list(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(one.nbytes for one in (self._x, self._values, self._bad, self._rest_x, self._rest))

    def add(self, x: Array, names: list[str], values: Array) -> None:
        """Add records: `x` (axes, n), `values` (names, n); NaN is no value, infinity one that is not finite."""
        counts, kept = np.count_nonzero(~np.isnan(values), axis=1).tolist(), []
        for index, name in enumerate(names):
            if name in self._rows or len(self._rows) < MOST_NAMES:
                self._rows.setdefault(name, len(self._rows))
                self.total[name] = self.total.get(name, 0) + counts[index]
                kept.append(index)
        self._grow_rows()
        raw = np.full((len(self._rows), self._rest.shape[1] + x.shape[1]), np.nan)
        raw[: self._rest.shape[0], : self._rest.shape[1]] = self._rest
        raw[[self._rows[names[index]] for index in kept], self._rest.shape[1] :] = values[kept]
        x = np.concatenate([self._rest_x, x], axis=1)
        start = 0
        while (whole := (x.shape[1] - start) // self.per_block) > 0:
            if self._size >= self.most:
                self.merge()
                continue
            count = min(whole, self.most - self._size)
            end = start + count * self.per_block
            self._push(x[:, start:end], raw[:, start:end], count)
            start = end
        self._rest_x, self._rest = x[:, start:].copy(), raw[:, start:].copy()

    def merge(self) -> None:
        """Merge neighbours: half of the blocks, half of the memory."""
        size, half = self._size, (self._size + 1) // 2
        starts, ends = np.arange(0, size, 2), np.minimum(np.arange(1, size + 1, 2), size - 1)
        (low, high, last), bad = self._values[:, :, :size], self._bad[:, :size]
        is_there = (~np.isnan(low) | bad)[:, ends]
        columns = max(_FIRST, half + half // 8)
        self._x = _widened(self._x[:, ends], columns)
        merged = np.stack(
            [
                np.fmin.reduceat(low, starts, axis=1),
                np.fmax.reduceat(high, starts, axis=1),
                np.where(is_there, last[:, ends], last[:, starts]),
            ]
        )
        self._values = _widened(merged, columns)
        self._bad = _widened(np.logical_or.reduceat(bad, starts, axis=1), columns)
        self._size = half
        self.per_block *= 2

    @property
    def places(self) -> Array:
        """Where the blocks end, on every axis."""
        return np.concatenate([self._x[:, : self._size], self._rest_x[:, -1:]], axis=1)

    def points(self, name: str) -> Points:
        """Return the points of a metric; `x` has a row for each axis. Empty if there is no such metric."""
        row = self._rows.get(name)
        if row is None:
            nothing = np.empty(0)
            return Points(self._x[:, :0], nothing, nothing, nothing, np.empty(0, np.bool_))
        x, values, bad = self._x[:, : self._size], self._values[:, row, : self._size], self._bad[row, : self._size]
        if self._rest.shape[1] > 0 and row < self._rest.shape[0]:
            rest, rest_bad = _summary(self._rest[row : row + 1, None, :])
            x, values = self.places, np.concatenate([values, rest[:, 0]], axis=1)
            bad = np.concatenate([bad, rest_bad[0]])
        low, high, last = values
        found = Points(x, low, high, last, bad)
        is_there = ~np.isnan(found.low) | found.bad
        return found.at(is_there)

    def _push(self, x: Array, raw: Array, count: int) -> None:
        if self._size + count > self._x.shape[1]:
            columns = min(self.most, max(2 * self._x.shape[1], self._size + count))
            self._x, self._values = _widened(self._x, columns), _widened(self._values, columns)
            self._bad = _widened(self._bad, columns)
        new = slice(self._size, self._size + count)
        values, bad = _summary(raw.reshape(raw.shape[0], count, self.per_block))
        self._values[:, : raw.shape[0], new], self._bad[: raw.shape[0], new] = values, bad
        self._x[:, new] = x[:, self.per_block - 1 :: self.per_block]
        self._size += count

    def _grow_rows(self) -> None:
        have, need = self._values.shape[1], len(self._rows)
        if need > have:
            more = max(need, have + have // 4) - have
            columns = self._x.shape[1]
            self._values = np.concatenate([self._values, np.full((3, more, columns), np.nan)], axis=1)
            self._bad = np.concatenate([self._bad, np.zeros((more, columns), np.bool_)])


def _summary(raw: Array) -> tuple[Array, Flags]:
    """Return lowest, highest and last (3, names, blocks) of raw values (names, blocks, records), and what is bad."""
    bad = np.isinf(raw)
    finite = np.where(bad, np.nan, raw) if bad.any() else raw
    if raw.shape[2] == 1:
        return np.repeat(finite[None, :, :, 0], 3, axis=0), bad[:, :, 0]
    final = raw.shape[2] - 1 - np.argmax(~np.isnan(raw[:, :, ::-1]), axis=2)
    last = np.take_along_axis(finite, final[:, :, None], axis=2)[:, :, 0]
    low, high = np.fmin.reduce(finite, axis=2), np.fmax.reduce(finite, axis=2)
    return np.stack([low, high, last]), np.logical_or.reduce(bad, axis=2)


def _widened(array: Any, columns: int) -> Any:
    """Return a copy with this many columns; the new ones are not filled, but those of values hold nothing."""
    wide = np.empty((*array.shape[:-1], columns), array.dtype)
    wide[..., : array.shape[-1]] = array[..., :columns]
    wide[..., array.shape[-1] :] = False if array.dtype == np.bool_ else np.nan
    return wide
