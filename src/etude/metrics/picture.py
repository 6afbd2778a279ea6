"""A confusion matrix as JSON and as an SVG picture, written without a plotting library."""

import json
import struct
import zlib
from collections.abc import Sequence
from html import escape

from torch import Tensor

MOST_CLASSES = 100
"""Number of classes up to which there is a picture."""
MOST_NUMBERS = 30
"""Number of classes up to which the cells of the picture have numbers."""
_CELL = 28
_TITLE = 'text-anchor="middle" font-weight="bold"'


def matrix_files(name: str, matrix: Tensor, class_names: Sequence[str] | None) -> dict[str, str]:
    """Return the files of a matrix (C, C) or of one per label (K, 2, 2): name to text.

    >>> import torch
    >>> list(matrix_files("confusion_matrix", torch.eye(2), ["cat", "dog"]))
    ['confusion_matrix.json', 'confusion_matrix.svg']
    """
    names = list(class_names or map(str, range(matrix.shape[0])))
    files = {f"{name}.json": json.dumps({"classes": names, "rows_are": "true", "matrix": matrix.tolist()}) + "\n"}
    if matrix.dim() == 2 and matrix.shape[0] <= MOST_CLASSES:
        files[f"{name}.svg"] = _picture(matrix.tolist(), names)
    return files


def matrix_png(rows: Sequence[Sequence[float]]) -> tuple[bytes, int]:
    """Return a square matrix as a PNG picture of shares by row, and its side in pixels, for tools without SVG.

    >>> matrix_png([[9, 1], [0, 5]])[0][:4], matrix_png([[9, 1], [0, 5]])[1]
    (b'\\x89PNG', 400)
    """
    cell = max(1, 400 // max(1, len(rows)))
    lines = []
    for row in rows:
        total = sum(row) or 1
        shares = (min(1.0, max(0.0, count / total)) for count in row)
        colors = (bytes(round(255 + (dark - 255) * share) for dark in (8, 48, 107)) for share in shares)
        lines.append((b"\0" + b"".join(color * cell for color in colors)) * cell)
    side = cell * len(rows)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(b"".join(lines)),
        b"IEND": b"",
    }
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts), side


def _picture(rows: list[list[float]], names: Sequence[str]) -> str:
    """Return an SVG: rows are true classes, columns predicted ones; a darker cell has a larger share of its row."""
    margin = 24 + 7 * max(map(len, names))
    side = margin + _CELL * len(rows) + 10
    half = margin + _CELL * len(rows) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" font-family="sans-serif" font-size="10">',
        f'<rect width="{side}" height="{side}" fill="white"/>',
        f'<text x="{half}" y="12" {_TITLE}>predicted</text>',
        f'<text x="12" y="{half}" {_TITLE} transform="rotate(-90 12 {half})">true</text>',
    ]
    for y, row in enumerate(rows):
        middle = margin + y * _CELL + _CELL / 2
        label = escape(names[y]) if len(names) == len(rows) else str(y)
        parts.append(f'<text x="{margin - 4}" y="{middle + 3}" text-anchor="end">{label}</text>')
        turned = f'transform="rotate(-90 {middle + 3} {margin - 4})"'
        parts.append(f'<text x="{middle + 3}" y="{margin - 4}" {turned}>{label}</text>')
        for x, count in enumerate(row):
            share = count / (sum(row) or 1)
            place = f'x="{margin + x * _CELL}" y="{margin + y * _CELL}"'
            parts.append(
                f'<rect {place} width="{_CELL}" height="{_CELL}" fill="#08306b" fill-opacity="{share:.3f}"/>'
            )
            if len(rows) <= MOST_NUMBERS:
                color = "white" if share > 0.5 else "black"
                text = f"{count:.2g}" if isinstance(count, float) else str(count)
                at = f'x="{margin + (x + 0.5) * _CELL}" y="{middle + 3}" text-anchor="middle"'
                parts.append(f'<text {at} fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])
