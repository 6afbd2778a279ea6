"""Curves as characters: braille dots in colours, or letters where there are no colours or only ASCII."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from rich.text import Text

from etude.core.spelling import printable
from etude.monitor.columns import Array
from etude.monitor.series import Series, downsample, share_of, smoothed

Style = Literal["braille", "letters", "ascii"]
"""Letters stand for points, where there are no colours to tell curves apart; ascii does without lines too."""
COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue", "white")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character: four rows of two dots."""
_LEAST = 16


def draw(
    curves: Sequence[Series],
    width: int = 80,
    height: int = 16,
    *,
    log: bool = False,
    smooth: float = 0.0,
    style: Style = "braille",
    x_label: str = "",
) -> Text:
    """Return curves with axes, `width` characters wide. With `log` the y axis is logarithmic.

    Values that cannot be shown (not finite, or not positive on a logarithmic axis) are gaps; a line below counts them.

    >>> print(draw([Series("loss", np.arange(3.0), np.array([4.0, 2.0, 1.0]))], 30, 3, style="ascii").plain)
    4 +a
      |             a
    1 +                          a
       0                         2
    """
    braille = style == "braille"
    points = [_scaled(Series(one.name, one.x, smoothed(one.y, smooth)), log) for one in curves]
    every_x = np.concatenate([x for x, _ in points]) if points else np.empty(0)
    every_y = np.concatenate([y for _, y in points]) if points else np.empty(0)
    every_x, every_y = every_x[np.isfinite(every_y)], every_y[np.isfinite(every_y)]
    if not len(every_y):
        return Text("no values to show" + (" on a logarithmic axis" if log else ""))
    low, high, left, right = (float(one) for one in (every_y.min(), every_y.max(), every_x.min(), every_x.max()))
    labels = _tick_labels(low, high, height, log)
    margin = max(map(len, labels)) + 2
    columns = max(_LEAST, width - margin)
    canvas = _Canvas(columns, height, 2 if braille else 1, 4 if braille else 1)
    for place, (x, y) in enumerate(points):
        canvas.add(place, share_of(x, left, right), 1.0 - share_of(y, low, high))
    text, marks = Text(no_wrap=True), "+|" if style == "ascii" else "┤│"
    for row, tick in enumerate(labels):
        text.append(f"{tick:>{margin - 2}} {marks[not tick]}", "dim")
        text.append_text(canvas.row(row, braille))
        text.rstrip()
        text.append("\n")
    first, last = _place(left), f"{_place(right)} {x_label}".rstrip()
    text.append(f"{'':{margin}}{first}{last:>{max(1, columns - len(first))}}\n", "dim")
    for line in _remarks(curves, points, log):
        text.append(f"{line}\n", "dim")
    text.rstrip()
    return text


class _Canvas:
    """Dots, each with the number of the curve that drew it."""

    def __init__(self, columns: int, rows: int, across: int, down: int) -> None:
        self.across, self.down = across, down
        self.dots = np.full((rows * down, columns * across), -1)

    def add(self, place: int, x: Array, y: Array) -> None:
        """Draw a curve whose points are shares of width and height; a NaN in y is a gap."""
        height, width = self.dots.shape
        few = downsample(x, y, width)
        columns = np.rint(np.clip(few.x, 0, 1) * (width - 1)).astype(int)  # a gap may be beyond all points
        before = None
        for column, low, high, last in zip(columns, few.low, few.high, few.last, strict=True):
            if math.isnan(last):
                before = None
                continue
            top, bottom, here = (round(value * (height - 1)) for value in (low, high, last))
            self.dots[top : bottom + 1, column] = place
            if before is not None:
                self._line(place, before, (column, here))
            before = (column, here)

    def _line(self, place: int, start: tuple[int, int], end: tuple[int, int]) -> None:
        count = max(abs(end[0] - start[0]), abs(end[1] - start[1])) + 1
        columns, rows = (np.rint(np.linspace(a, b, count)).astype(int) for a, b in zip(start, end, strict=True))
        if self.down > 1:  # letters stand for points, dots join them
            self.dots[rows, columns] = place

    def row(self, row: int, braille: bool) -> Text:
        """Return one line of characters."""
        text = Text()
        block = self.dots[row * self.down : (row + 1) * self.down]
        for column in range(0, block.shape[1], self.across):
            cell = block[:, column : column + self.across]
            place = int(cell.max())
            if place < 0:
                text.append(" ")
            elif braille:
                bits = sum(_DOTS[y][x] for y, x in zip(*np.nonzero(cell >= 0), strict=True))
                text.append(chr(0x2800 + bits), COLORS[place % len(COLORS)])
            else:
                text.append(_letter(place), COLORS[place % len(COLORS)])
        return text


def legend(names: Sequence[str], style: Style) -> Text:
    """Return the names of the curves with their marks."""
    text = Text("  ")
    for place, name in enumerate(names):
        mark = "⠒⠒" if style == "braille" else _letter(place)
        text.append(f"{mark} ", COLORS[place % len(COLORS)]).append(f"{printable(name)}   ")
    return text


def _letter(place: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[place % 26]


def _scaled(one: Series, log: bool) -> tuple[Array, Array]:
    """Return the points of a curve as they are drawn, with NaN for values that cannot be shown."""
    keep = np.isfinite(one.x)
    x, y = one.x[keep], one.y[keep]
    return x, np.log10(np.where(y > 0, y, np.nan)) if log else y


def _tick_labels(low: float, high: float, height: int, log: bool) -> list[str]:
    labels = [""] * height
    if low == high:
        labels[(height - 1) // 2] = _short(_unscaled(low, log))
        return labels
    for row in {0, height // 2, height - 1} if height > 4 else {0, height - 1}:
        share = 1 - row / max(1, height - 1)
        value = high * share + low * (1 - share)
        labels[row] = _short(_unscaled(value, log))
    return labels


def _unscaled(value: float, log: bool) -> float:
    return 10.0 ** min(value, 308.25) if log else value


def _short(value: float) -> str:
    return f"{value:.4g}"


def _place(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e12 else _short(value)


def _remarks(curves: Sequence[Series], points: Sequence[tuple[Array, Array]], log: bool) -> list[str]:
    hidden = sum(len(one.y) - int(np.isfinite(y).sum()) for one, (_, y) in zip(curves, points, strict=True))
    total = sum(len(one.y) for one in curves)
    if not hidden:
        return []
    why = "not finite or not positive" if log else "not finite"
    return [f"{hidden:,} of {total:,} values are {why} and not shown"]
