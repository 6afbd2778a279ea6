"""The progress view as rich tables and bars, drawn on a terminal without a thread."""

import io
import sys
from contextlib import suppress
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.callbacks import progress_lines as words
from etude.callbacks.progress_lines import EpochRow, Groups, View, label, metric, split_name

MAX_WIDTH = 104
"""Maximum width in columns, so that lines stay readable on a wide terminal."""
MAX_NAME = 24
"""Maximum width of a group's name."""
_METRIC_WIDTH, _OTHER_WIDTH = 11, 34
"""Approximate width of a metric in the table of epochs, and of everything else there."""
_IN_COLUMNS = frozenset({"loss", "weight", "nll"})
"""Metrics of a group that have their own column, or none."""


class LiveTerminal:
    """A region at the bottom of the terminal that is redrawn in place; other output appears above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            vertical_overflow="crop",
            # A redirected stream stays redirected.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def draw(self, view: View) -> None:
        """Draw the view in place of the last one."""
        self._live.update(frame(view, *self._console.size), refresh=True)

    def stop(self) -> None:
        """Keep the last frame, and restore the cursor, stdout and stderr."""
        with suppress(OSError, ValueError):  # the terminal may be gone; rich has restored the streams by then
            self._live.stop()


def frame(view: View, width: int, height: int) -> RenderableType:
    """Return the display for a terminal of this size: a small one omits earlier epochs and then groups."""
    phase = f"  phase {view.phase}" if view.phase else ""
    parts: list[RenderableType] = [_line((view.title, "bold"), (phase, "cyan"), (f"  {view.subtitle}", "dim"))]
    room = height - 12
    groups = group_table(view.groups, running=not view.outcome)
    below: list[RenderableType] = []
    if groups.row_count and groups.row_count <= room:
        below, room = ["", groups], room - groups.row_count
    if view.rows and room > 0:
        parts += ["", epoch_table(view.rows, min(width, MAX_WIDTH), min(words.MAX_ROWS, room), view.judges)]
    parts += [*below, ""]
    if view.outcome:
        parts.append(_line((words.outcome_line(view), "bold")))
    else:
        numbers = words.log_numbers(view.record)
        spans = [span for name, value in numbers for span in ((f"{name} ".lstrip(), "dim"), f"{value}   ")]
        parts += [_bars(view, min(width, MAX_WIDTH) - 1), _line(*spans)]
    parts += [Text(note, "yellow") for note in (*view.notices, view.note) if note]
    return Padding(Group(*parts), (0, 0, 0, 1))


def _line(*spans: str | tuple[str, str]) -> Text:
    return Text.assemble(*spans, no_wrap=True, overflow="ellipsis")


def _bars(view: View, width: int) -> Table:
    per_epoch = view.steps_per_epoch
    share = "validating" if view.validating else f"{view.step_in_epoch / per_epoch:.0%}" if per_epoch else ""
    seconds, when = (view.elapsed_s, "so far") if view.left_s is None else (view.left_s, "left")
    epoch = f"epoch {words.of_total(view.epoch + 1, view.total_epochs)}"
    grid = Table.grid("", "", "", "", padding=(0, 2, 0, 0))
    grid.width, grid.columns[1].ratio, grid.columns[2].justify, grid.columns[3].style = width, 1, "right", "dim"
    for name, count, total, text in (
        (epoch, view.step_in_epoch, per_epoch, share),
        ("run", view.step, view.total_steps, f"{words.duration(seconds)} {when}"),
    ):
        bar = ProgressBar(total or 1, count if total else 0, complete_style="cyan", finished_style="cyan")
        grid.add_row(name, bar, words.of_total(count, total), text)
    return grid


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def epoch_table(
    all_rows: list[EpochRow], width: int, max_rows: int, judges: words.Judges = words.USUAL_JUDGES
) -> Table:
    """Return one line per finished epoch, with as many metrics as fit; the last column is its phase."""
    best, rows = words.best_row(all_rows, judges), words.keep_rows(all_rows, max_rows, judges)[-max_rows - 1 :]
    known = words.worth_showing({name: None for row in all_rows for name in row.numbers})
    names = list(known)[: max(1, (width - _OTHER_WIDTH) // _METRIC_WIDTH)]
    has_tokens = any(row.numbers.get("tokens_per_s") for row in all_rows)
    titles = [label(name) if name.startswith("val_") else f"train {label(name)}" for name in names]
    table = _table()
    for title in ("epoch", *titles, *["tokens/s"] * has_tokens, "time"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("phase" if any(row.phase for row in rows) else "")
    for row in rows:
        values = [metric(name, row.numbers[name]) if name in row.numbers else "" for name in names]
        values += [words.rate(row.numbers.get("tokens_per_s") or 0.0)] * has_tokens
        mark, style = ("★ ", "green") if row is best else ("", "")
        table.add_row(f"{mark}{row.epoch + 1}", *values, words.duration(row.seconds), row.phase, style=style)
    return table


def group_table(groups: Groups, running: bool = False) -> Table:
    """Return one line per group: weight, losses and other metrics; `running` adds those of log points."""
    numbers, latest = groups.numbers, groups.latest if running else {}
    both = numbers | latest
    known = (split_name(name) for name, value in both.items() if value is not None)
    names = dict.fromkeys(group for group, own in known if own.removeprefix("val_") != "weight")
    columns = {
        "weight": [both.get(f"{name}/weight") for name in names],
        "loss now": [latest.get(f"{name}/loss") for name in names],
        "train loss": [numbers.get(f"{name}/loss") for name in names],
        "val loss": [numbers.get(f"val_{name}/loss") for name in names],
    }
    columns = {title: cells for title, cells in columns.items() if any(cell is not None for cell in cells)}
    table = _table()
    table.add_column(f"task, {groups.when}" if groups.when else "task", no_wrap=True, max_width=MAX_NAME)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column()
    for name, *cells in zip(names, *columns.values(), strict=True):
        shown = ["" if cell is None else words.number(cell) for cell in cells]
        table.add_row(name, *shown, _other_numbers(both, name))
    return table


def _other_numbers(numbers: words.Numbers, group: str) -> str:
    """Return the metrics other than weight and losses: of the validation, or else of the training."""
    own = [split_name(name)[1].removeprefix("val_") for name in numbers if split_name(name)[0] == group]
    found = {name: numbers.get(f"val_{group}/{name}", numbers.get(f"{group}/{name}")) for name in own}
    return "  ".join(f"{label(n)} {metric(n, value)}" for n, value in found.items() if n not in _IN_COLUMNS)


def group_lines(groups: Groups) -> list[str]:
    """Return the table of groups for a file, below the line of an epoch or a validation."""
    console = Console(file=io.StringIO(), width=MAX_WIDTH, color_system=None)
    table = group_table(groups)
    with console.capture() as text:
        console.print(table)
    return [f"  {line.rstrip()}" for line in text.get().splitlines()] if table.row_count else []
