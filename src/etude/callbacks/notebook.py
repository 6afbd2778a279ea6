"""The progress view as one HTML cell of a notebook, updated in place: Jupyter, Colab, VS Code."""

import io
import sys
import uuid
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from etude.callbacks import progress_lines as words
from etude.callbacks.progress_lines import View

REFRESH_S = 0.5
"""Seconds between two updates: each one is a message to the browser."""
_LINES = 60
"""Height of the view: there is room for all epochs that it keeps, and many tasks."""
_COLORS = {"loss": "#3b82f6", "val_loss": "#f97316"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 480, 160, 56, 20


def in_notebook() -> bool:
    """Return whether output goes to a notebook. IPython is asked only if it has been imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None  # a shell in a terminal has none


class NotebookCell:
    """An output of the current cell that is replaced by every `draw`."""

    def __init__(self) -> None:
        self._id = f"etude-{uuid.uuid4().hex}"
        self._is_shown = False

    def draw(self, view: View) -> None:
        """Show the view in place of the last one; raise OSError if the notebook cannot be reached."""
        from IPython.display import display, update_display

        html, text = page(view)
        show: Any = update_display if self._is_shown else display
        try:
            show({"text/html": html, "text/plain": text}, raw=True, display_id=self._id)
        except Exception as error:  # whatever its sockets raise must not end the run
            raise OSError(f"the notebook cannot be reached: {error}") from error
        self._is_shown = True

    def stop(self) -> None:
        """Keep the last output."""


def page(view: View) -> tuple[str, str]:
    """Return the view as HTML, what a terminal would show with the curves at the end, and as plain text."""
    from rich.console import Console

    from etude.callbacks.terminal import MAX_WIDTH, frame

    console = Console(file=io.StringIO(), width=MAX_WIDTH, record=True, force_jupyter=False)
    console.print(frame(view, MAX_WIDTH, _LINES))
    text = console.export_text(clear=False)
    html = console.export_html(inline_styles=True, code_format="<pre style='line-height:1.3'>{code}</pre>")
    return f"<div>{html}{curves(view.curves) if view.outcome else ''}</div>", text


def curves(found: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Return the losses over the steps as SVG; empty if there are fewer than two values."""
    every = [point for points in found.values() for point in points]
    if len(every) < 2:
        return ""
    left, right = min(step for step, _ in every), max(step for step, _ in every)
    low, high = min(value for _, value in every), max(value for _, value in every)
    wide, tall = (right - left) or 1, (high / 2 - low / 2) or 1.0  # the whole difference may overflow

    def place(point: tuple[int, float]) -> str:
        x = _LEFT + (point[0] - left) / wide * (_WIDTH - _LEFT - 8)
        y = 8 + (high / 2 - point[1] / 2) / tall * (_HEIGHT - _BOTTOM - 8)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f"<polyline points='{' '.join(map(place, points))}' fill='none' stroke='{_COLORS[name]}' stroke-width='1.5'/>"
        + "".join(_dot(place(point), _COLORS[name]) for point in points if len(points) <= 40)
        for name, points in found.items()
    )
    labels = [(_LEFT - 6, 14, "end", words.number(high)), (_LEFT - 6, _HEIGHT - _BOTTOM, "end", words.number(low))]
    labels += [(_LEFT, _HEIGHT - 4, "start", f"{left:,}"), (_WIDTH - 8, _HEIGHT - 4, "end", f"{right:,} steps")]
    texts = "".join(
        f"<text x='{x}' y='{y}' text-anchor='{anchor}' font-size='11' fill='currentColor' opacity='.6'>{text}</text>"
        for x, y, anchor, text in labels
    )
    legend = "".join(
        f"<span style='color:{_COLORS[name]};margin-right:12px'>{escape(words.label(name))}</span>" for name in found
    )
    style = f"width:100%;max-width:{_WIDTH}px;display:block"
    svg = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' style='{style}'>{lines}{texts}</svg>"
    return f"<div style='margin-top:6px'>{legend}{svg}</div>"


def _dot(place: str, color: str) -> str:
    x, y = place.split(",")
    return f"<circle cx='{x}' cy='{y}' r='2' fill='{color}'/>"
