"""Tables of numbers as small pictures: a PNG inside the page, one pixel for each cell."""

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from etude.monitor.columns import Array
from etude.monitor.series import RunMetrics, downsample
from etude.runs.report.chart import compact
from etude.runs.report.html import text

_COLORS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64)
"""Viridis, from low to high."""
MOST_ROWS = 80
_COLUMNS = 240
_ROW = 15


def picture(shares: Array) -> str:
    """Return a table of numbers from 0 to 1 as the address of a PNG; NaN is transparent."""
    filled = np.nan_to_num(np.clip(shares, 0, 1)) * (len(_COLORS) - 1)
    below = np.minimum(filled.astype(int), len(_COLORS) - 2)
    part = (filled - below)[..., None]
    colors = _COLORS[below] * (1 - part) + _COLORS[below + 1] * part
    alpha = np.where(np.isnan(shares), 0, 255)[..., None]
    pixels = np.concatenate([np.rint(colors), alpha], axis=2).astype(np.uint8)
    height, width = shares.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        _piece(kind, body) for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    )
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _piece(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def norm_heatmap(run: RunMetrics, prefix: str = "grad_norm/") -> str:
    """Return the gradient norm of every layer over the steps, the largest of each bucket, on a logarithmic scale."""
    names = [name for name in run.names("train") if name.startswith(prefix)]
    shown = names[:: -(-len(names) // MOST_ROWS)] if names else []
    series = [run.series(name, split="train") for name in shown]
    edges = [value for one in series for value in one.x[[0, -1]] if np.isfinite(value)]
    if not edges or min(edges) >= max(edges):
        return ""
    left, right = min(edges), max(edges)
    cells = np.full((len(series), _COLUMNS), np.nan)
    for row, one in enumerate(series):
        few = downsample(one.x, one.y, _COLUMNS)
        places = np.minimum(((few.x - left) / (right - left) * _COLUMNS).astype(int), _COLUMNS - 1)
        np.fmax.at(cells[row], places, few.high)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(np.where(cells > 0, cells, np.nan))
    if not np.isfinite(logs).any():
        return ""
    low, high = float(np.nanmin(logs)), float(np.nanmax(logs))
    filled = _filled(logs)
    source = picture((filled - low) / (high - low) if high > low else filled * 0 + 0.5)
    labels = [name.removeprefix(prefix) for name in shown]
    left_out = f" Every {-(-len(names) // MOST_ROWS)}th of {len(names)} layers." if len(shown) < len(names) else ""
    return _framed(source, labels, left, right, 10.0**low, 10.0**high, left_out)


def _filled(cells: Array) -> Array:
    """Return the cells with those between two log points filled from the left."""
    known = np.where(np.isnan(cells), 0, np.arange(cells.shape[1]))
    return cells[np.arange(len(cells))[:, None], np.maximum.accumulate(known, axis=1)]


def _framed(source: str, labels: Sequence[str], left: float, right: float, low: float, high: float, more: str) -> str:
    margin, width, height = 190, 1100, _ROW * len(labels)
    names = "".join(
        f'<text class="tick" x="{margin - 6}" y="{row * _ROW + 10}" text-anchor="end">{text(name, 30)}</text>'
        for row, name in enumerate(labels)
    )
    picture_element = (
        f'<image href="{source}" x="{margin}" y="0" width="{width - margin}" height="{height}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    )
    ticks = "".join(
        f'<text class="tick" x="{x}" y="{height + 14}" text-anchor="{anchor}">{compact(value)}</text>'
        for x, anchor, value in ((margin, "start", left), (width, "end", right))
    )
    caption = (
        f"<b>gradient norm by layer</b> <span class='muted'>{compact(low)} (dark) to {compact(high)} (bright), "
        f"logarithmic.{more}</span>"
    )
    return (
        f'<figure class="wide"><figcaption>{caption}</figcaption><svg viewBox="0 0 {width} {height + 20}" role="img" '
        f'aria-label="gradient norm by layer">{names}{picture_element}{ticks}</svg></figure>'
    )
