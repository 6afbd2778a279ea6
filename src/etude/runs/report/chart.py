"""Curves as inline SVG: a line, a band from the lowest to the highest value, and marks for events."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.monitor.columns import Array
from etude.monitor.series import Buckets, Series, downsample, share_of
from etude.runs.report.html import text

COLORS = 8
"""Colours of curves in the style sheet."""
LOG_RANGE = 1000.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 8, 22


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of a chart."""

    label: str
    series: Series
    color: int = 0
    faint: bool = False

    @property
    def css(self) -> str:
        """Its classes in the style sheet."""
        return f"c{self.color % COLORS}{' faint' if self.faint else ''}"


@dataclass(frozen=True, slots=True)
class Marks:
    """What happened, by step."""

    phases: list[tuple[float, str]] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)
    checkpoints: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Axes:
    left: float
    right: float
    low: float
    high: float
    log: bool
    width: int
    height: int

    def x(self, values: Array) -> Array:
        return _LEFT + share_of(values, self.left, self.right) * (self.width - _LEFT - _RIGHT)

    def y(self, values: Array) -> Array:
        scaled = np.log10(np.where(values > 0, values, np.nan)) if self.log else values
        low, high = (math.log10(one) if self.log else one for one in (self.low, self.high))
        return self.height - _BOTTOM - share_of(scaled, low, high) * (self.height - _TOP - _BOTTOM)


def chart(title: str, lines: Sequence[Line], marks: Marks, points: int = 300, *, small: bool = False) -> str:
    """Return a figure with all curves; empty if none has a finite value.

    A curve with more than `points` points is drawn by buckets. Values that are not finite are gaps, with a red mark
    on the axis.
    """
    drawn = [(line, downsample(line.series.x, line.series.y, points)) for line in lines]
    drawn = [(line, few) for line, few in drawn if np.isfinite(few.last).any()]
    if not drawn:
        return ""
    width, height = (320, 150) if small else (640, 230)
    axes = _axes([few for _, few in drawn], width, height)
    bad = np.concatenate([line.series.x[np.isnan(line.series.y)] for line, _ in drawn])
    box = [_LEFT, _TOP, width - _RIGHT, height - _BOTTOM]  # for the script that shows values
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text(title)}" data-box="{json.dumps(box)}">',
        *_events(axes, marks),
        *_grid(axes),
        *(_band(axes, few, line) for line, few in drawn),
        *(_curve(axes, few, line) for line, few in drawn),
        *_ticks_at(axes, bad, "bad", axes.height - _BOTTOM + 6, "not finite"),
        "</svg>",
    ]
    legend = "".join(f'<span class="key {line.css}">{text(line.label)}</span>' for line, _ in drawn)
    scale = ' <span class="muted">log scale</span>' if axes.log else ""
    caption = f"<figcaption><b>{text(title)}</b>{scale} {legend if len(drawn) > 1 else ''}</figcaption>"
    return f'<figure class="chart{" small" if small else ""}">{caption}{"".join(parts)}</figure>'


def _axes(curves: Sequence[Buckets], width: int, height: int) -> _Axes:
    low = min(float(np.nanmin(few.low)) for few in curves)
    high = max(float(np.nanmax(few.high)) for few in curves)
    left, right = min(float(few.x.min()) for few in curves), max(float(few.x.max()) for few in curves)
    log = low > 0 and high / low > LOG_RANGE
    if low == high:
        wider = abs(low) * 0.05 or 1.0
        low, high = max(-1.7e308, low - wider), min(1.7e308, high + wider)
    elif not log:
        edge = (high / 2 - low / 2) * 0.08
        low, high = max(-1.7e308, low - edge), min(1.7e308, high + edge)
    return _Axes(left, right, low, high, log, width, height)


def _grid(axes: _Axes) -> list[str]:
    found = []
    for value in _decades(axes.low, axes.high) if axes.log else nice_ticks(axes.low, axes.high, 4):
        y = float(axes.y(np.array([value]))[0])
        found.append(f'<line class="grid" x1="{_LEFT}" x2="{axes.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        found.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{compact(value)}</text>'
        )
    for value in nice_ticks(axes.left, axes.right, 3 if axes.width < 400 else 6):
        x = float(axes.x(np.array([value]))[0])
        found.append(
            f'<text class="tick" x="{x:.1f}" y="{axes.height - 6}" text-anchor="middle">{compact(value)}</text>'
        )
    return found


def _events(axes: _Axes, marks: Marks) -> list[str]:
    top, bottom, found = _TOP, axes.height - _BOTTOM, list[str]()
    inside = [(step, name) for step, name in marks.phases if step <= axes.right]
    ends = [*(step for step, _ in inside[1:]), axes.right][: len(inside)]
    for place, ((step, name), end) in enumerate(zip(inside, ends, strict=True)):
        x, to = axes.x(np.array([max(step, axes.left), max(end, axes.left)]))
        if to - x < 0.5:
            continue
        shade = "phase odd" if place % 2 else "phase"
        found.append(
            f'<rect class="{shade}" x="{x:.1f}" y="{top}" width="{to - x:.1f}" height="{bottom - top}">'
            f"<title>phase {text(name)} from step {step:,.0f}</title></rect>"
        )
        if to - x > 40:
            found.append(
                f'<text class="phase-name" x="{x + 4:.1f}" y="{top + 10}">{text(name, int((to - x) / 6))}</text>'
            )
    for x in _inside(axes, marks.resumes):
        found.append(
            f'<line class="resume" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"><title>resumed</title></line>'
        )
    found += _ticks_at(axes, np.array(marks.checkpoints), "saved", bottom, "checkpoint")
    return found + _ticks_at(axes, np.array(marks.skipped), "skipped", bottom, "skipped updates")


def _ticks_at(axes: _Axes, steps: Array, kind: str, bottom: float, words: str) -> list[str]:
    """Return one path of short marks on the x axis, none closer than a pixel to the next."""
    places = sorted({round(float(x)) for x in _inside(axes, steps)})
    path = "".join(f"M{x} {bottom:.0f}v-6" for x in places)
    return [f'<path class="{kind}" d="{path}"><title>{words}</title></path>'] if path else []


def _inside(axes: _Axes, steps: Sequence[float] | Array) -> Array:
    values = np.asarray(steps, dtype=np.float64)
    return axes.x(values[(values >= axes.left) & (values <= axes.right)])


def _curve(axes: _Axes, few: Buckets, line: Line) -> str:
    x, y = axes.x(few.x), axes.y(few.last)
    values = [[_digits(one) for one in few.x], [_digits(one) for one in few.last]]
    data = text(json.dumps({"name": line.label[:80], "x": values[0], "y": values[1]}, separators=(",", ":")), 1 << 20)
    dots = ""
    if np.isfinite(y).sum() <= 40:
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2"/>' for a, b in zip(x, y, strict=True) if b == b)
    return f'<g class="line {line.css}" data-points="{data}"><path d="{path_of(x, y)}"/>{dots}</g>'


def _band(axes: _Axes, few: Buckets, line: Line) -> str:
    """Return the area between the lowest and highest values, in one piece between two gaps."""
    x, low, high = axes.x(few.x), axes.y(few.low), axes.y(few.high)
    known = np.isfinite(low) & np.isfinite(high)
    if not (known & (few.low < few.high)).any():
        return ""
    pieces = []
    for part in np.split(np.arange(len(x)), np.flatnonzero(~known)):
        part = part[known[part]]
        if len(part) > 1:
            there = [f"{x[at]:.1f} {high[at]:.1f}" for at in part]
            back = [f"{x[at]:.1f} {low[at]:.1f}" for at in part[::-1]]
            pieces.append(f"M{'L'.join([*there, *back])}Z")
    return f'<path class="band c{line.color % COLORS}" d="{"".join(pieces)}"/>' if pieces else ""


def path_of(x: Array, y: Array) -> str:
    """Return a path through points; a NaN in y is a gap.

    >>> path_of(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, np.nan, 2.0, 4.0]))
    'M0.0 1.0M2.0 2.0L3.0 4.0'
    """
    found, pen = [], "M"
    for a, b in zip(x, y, strict=True):
        if b == b:
            found.append(f"{pen}{a:.1f} {b:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(found)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers between two others.

    >>> nice_ticks(0.13, 0.92, 4)
    [0.2, 0.4, 0.6, 0.8]
    """
    span = high / 2 - low / 2
    if not (span > 0 and math.isfinite(span)):
        return [low]
    rough = span / count * 2
    if rough < 1e-300 or rough > 1e300:
        return [low, high]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(one * size for one in (1, 2, 5, 10) if one * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [place * step for place in range(first, min(last, first + 12) + 1)]
    return [round(value, 12) if step > 1e-9 else value for value in found] or [low, high]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, (last - first + 1) // 5)
    return [10.0**power for power in range(first, last + 1, every)]


def compact(value: float) -> str:
    """Return a number for an axis.

    >>> compact(12500), compact(0.25), compact(3e-7), compact(2e6)
    ('12.5k', '0.25', '3e-07', '2M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def _digits(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
