"""Confusion matrices of a report, with the classes that are mixed up most."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.runs.report.heat import picture
from etude.runs.report.html import table, text

MOST_CELLS = 30
"""Classes up to which a matrix is a table with numbers."""
_MOST_CLASSES = 1000
_MOST_CONFUSIONS = 8


def matrix_section(name: str, step: Any, data: Any) -> str:
    """Return a matrix of true classes by predicted ones; empty if the data is something else."""
    found = _read(data)
    if found is None:
        return ""
    rows, names = found
    shares = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-300)
    body = _cells(rows, shares, names) if len(rows) <= MOST_CELLS else _image(shares)
    place = f" after step {step:,}" if isinstance(step, int) else ""
    most = _confusions(rows, shares, names)
    caption = f"<b>{text(name)}</b> <span class='muted'>rows are true, columns predicted{place}</span>"
    return f'<figure class="wide"><figcaption>{caption}</figcaption><div class="beside">{body}{most}</div></figure>'


def _read(data: Any) -> tuple[np.ndarray[Any, np.dtype[np.float64]], list[str]] | None:
    try:
        rows = np.array(data["matrix"], dtype=np.float64)
        names = [str(one) for one in data.get("classes") or ()]
    except (TypeError, KeyError, ValueError, OverflowError, AttributeError):
        return None
    if rows.ndim != 2 or rows.shape[0] != rows.shape[1] or not 0 < len(rows) <= _MOST_CLASSES:
        return None
    if not np.isfinite(rows).all() or (rows < 0).any():
        return None
    return rows, names if len(names) == len(rows) else [str(place) for place in range(len(rows))]


def _cells(rows: Any, shares: Any, names: Sequence[str]) -> str:
    head = "".join(f'<th class="turned"><span>{text(name, 24)}</span></th>' for name in names)
    body = []
    for place, name in enumerate(names):
        cells = "".join(
            f'<td class="{"dark" if share > 0.55 else ""}" style="--s:{share:.3f}">{_count(value)}</td>'
            for value, share in zip(rows[place], shares[place], strict=True)
        )
        body.append(f"<tr><th>{text(name, 24)}</th>{cells}</tr>")
    return (
        f'<div class="scroll"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _image(shares: Any) -> str:
    return f'<img class="matrix" alt="confusion matrix" src="{picture(shares)}">'


def _confusions(rows: Any, shares: Any, names: Sequence[str]) -> str:
    wrong = np.where(np.eye(len(rows), dtype=bool), 0, rows)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_CONFUSIONS]
    places = [divmod(int(one), len(rows)) for one in order if wrong.flat[one] > 0]
    cells = [
        [text(names[true], 40), text(names[seen], 40), _count(rows[true, seen]), f"{shares[true, seen]:.1%}"]
        for true, seen in places
    ]
    head = ["true", "predicted as", "samples", "of the class"]
    return f"<div><h3>most confused</h3>{table(head, cells)}</div>" if cells and len(rows) > 2 else ""


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == math.floor(value) else f"{value:.2f}"
