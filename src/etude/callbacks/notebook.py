"""The progress view as one HTML cell of a notebook, updated in place: Jupyter, Colab, VS Code."""

import sys
import uuid
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from etude.callbacks import progress_lines as words
from etude.callbacks.progress_lines import View
from etude.callbacks.progress_tables import Cells, epoch_cells, group_cells

REFRESH_S = 0.5
"""Seconds between two updates: each one is a message to the browser."""
_MOST_METRICS = 8
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

        bundle = {"text/html": page(view), "text/plain": plain(view)}
        show: Any = update_display if self._is_shown else display
        try:
            show(bundle, raw=True, display_id=self._id)
        except Exception as error:  # whatever its sockets raise must not end the run
            raise OSError(f"the notebook cannot be reached: {error}") from error
        self._is_shown = True

    def stop(self) -> None:
        """Keep the last output."""


def plain(view: View) -> str:
    """Return the view as text, for a notebook without HTML."""
    lines = [f"{view.title}  {view.subtitle}"]
    lines += [words.epoch_line(view, row) for row in view.rows]
    lines.append(words.outcome_line(view) if view.outcome else words.log_line(view))
    return "\n".join([*lines, *(note for note in (*view.notices, view.note) if note)])


def page(view: View) -> str:
    """Return the view as HTML, with styles of its own: it follows the colours of the notebook."""
    phase = f" <span style='opacity:.8'>phase {escape(view.phase)}</span>" if view.phase else ""
    parts = [f"<div><b>{escape(view.title)}</b>{phase} <span style='opacity:.6'>{escape(view.subtitle)}</span></div>"]
    if view.rows:
        parts.append(_table(epoch_cells(view.rows, _MOST_METRICS, words.MAX_ROWS, view.judges)))
    groups = group_cells(view.groups, running=not view.outcome)
    if groups.rows:
        parts.append(_table(groups))
    if view.outcome:
        parts += [f"<div><b>{escape(words.outcome_line(view))}</b></div>", curves(view.curves)]
    else:
        parts += [_bars(view), _numbers(words.log_numbers(view.record))]
    parts += [f"<div style='color:#b7791f'>{escape(note)}</div>" for note in (*view.notices, view.note) if note]
    return f"<div style='font:13px/1.5 sans-serif;max-width:760px'>{''.join(parts)}</div>"


def _table(cells: Cells) -> str:
    style = "padding:1px 12px 1px 0;border:0;background:transparent;font-variant-numeric:tabular-nums;text-align:"
    sides = ["left" if place in (0, len(cells.titles) - 1) else "right" for place in range(len(cells.titles))]
    head = "".join(
        f"<th style='{style}{side};opacity:.6;font-weight:normal'>{escape(title)}</th>"
        for title, side in zip(cells.titles, sides, strict=True)
    )
    body = ""
    for place, row in enumerate(cells.rows):
        bold = ";font-weight:bold" if place == cells.best else ""
        inside = "".join(
            f"<td style='{style}{side}{bold}'>{escape(cell)}</td>" for cell, side in zip(row, sides, strict=True)
        )
        body += f"<tr style='background:transparent'>{inside}</tr>"
    outer = "font:inherit;color:inherit;border-collapse:collapse;margin:6px 0;border:0"
    return f"<table style='{outer}'><tr>{head}</tr>{body}</table>"


def _bars(view: View) -> str:
    per_epoch = view.steps_per_epoch
    seconds, when = (view.elapsed_s, "so far") if view.left_s is None else (view.left_s, "left")
    epoch = f"epoch {words.of_total(view.epoch + 1, view.total_epochs)}"
    return "".join(
        f"<div style='display:flex;gap:10px;align-items:center'><span style='width:90px'>{name}</span>"
        "<div style='flex:1;height:6px;border-radius:3px;background:rgba(128,128,128,.25)'>"
        f"<div style='width:{100 * min(1.0, count / total) if total else 0:.1f}%;height:6px;border-radius:3px;"
        f"background:#3b82f6'></div></div><span style='min-width:190px;opacity:.8'>{text}</span></div>"
        for name, count, total, text in (
            (epoch, view.step_in_epoch, per_epoch, _share(view)),
            (
                "run",
                view.step,
                view.total_steps,
                f"{words.of_total(view.step, view.total_steps)}, {words.duration(seconds)} {when}",
            ),
        )
    )


def _share(view: View) -> str:
    steps = words.of_total(view.step_in_epoch, view.steps_per_epoch)
    return f"{steps}, validating" if view.validating else steps


def _numbers(numbers: Sequence[tuple[str, str]]) -> str:
    spans = "".join(
        f"<span style='margin-right:14px'><span style='opacity:.6'>{escape(name)}</span> {escape(value)}</span>"
        for name, value in numbers
    )
    return f"<div style='margin-top:4px'>{spans}</div>" if spans else ""


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
