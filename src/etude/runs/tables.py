"""Lists and comparisons of runs as rich tables."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from etude.callbacks.progress_lines import duration, label, metric, number
from etude.core.spelling import printable
from etude.monitor.live import RunStatus
from etude.runs.comparison import Comparison
from etude.runs.filters import plain
from etude.runs.leaves import ABSENT
from etude.runs.listing import ListedRun

MOST_RUNS = 40
"""Runs of a list without --all."""
MOST_KEYS = 4
"""Config keys of a list without --all."""
_MOST_CHARS = 28
_STATES = {"running": "green", "finished": "", "failed": "red", "lost": "red", "interrupted": "yellow"}


def run_table(runs: Sequence[ListedRun], keys: Sequence[str]) -> Table:
    """Return a table with one line for each run, and a column for each of the config keys."""
    table = _table()
    monitors = {run.status.monitor for run in runs if run.status.best}
    judge = f" {label(printable(next(iter(monitors))))}" if len(monitors) == 1 else ""
    for title in ("run", "state", "progress", f"best{judge}", f"last{judge}", "duration", "age"):
        table.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=title != "run")
        table.columns[-1].overflow = "fold"
    for title in short_keys(keys):
        table.add_column(printable(title), justify="right", overflow="fold")
    for run in runs:
        status = run.status
        best, last = (_value(status, one, with_name=not judge) for one in (status.best, status.last))
        together = f" ×{status.processes}" if status.processes > 1 else ""
        state = Text(f"{status.state}{together}", _STATES.get(status.state, ""))
        took = duration(status.duration_s) if status.started else ""
        settings = [printable(plain(run.config.get(key, ABSENT)), _MOST_CHARS) for key in keys]
        table.add_row(printable(run.id), state, progress(status), best, last, took, age(run.age_s), *settings)
    return table


def progress(status: RunStatus) -> str:
    """Return how far a run is: epochs, share, and the time left of a running one."""
    words = []
    if status.total_epochs is not None and status.total_epochs > 1:
        words.append(f"{status.epoch}/{status.total_epochs}")
    elif status.progress is None:
        words.append(f"step {status.step:,}")
    if status.progress is not None:
        words.append(f"{status.progress:.0%}")
    if status.left_s is not None:
        words.append(f"{duration(status.left_s)} left")
    return " ".join(words)


def age(seconds: float | None) -> str:
    """Return how long ago something was, in its largest unit.

    >>> age(5), age(150), age(7200), age(3 * 86400), age(None)
    ('5 s', '2 min', '2 h', '3 d', '')
    """
    if seconds is None:
        return ""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return the last parts of dotted keys, as many as tell them apart.

    >>> short_keys(["optimizer.lr", "model.name", "data.name"])
    ['lr', 'model.name', 'data.name']
    """
    found = []
    for key in keys:
        parts = key.split(".")
        names = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found.append(next((one for one in names if sum(f".{other}".endswith(f".{one}") for other in keys) == 1), key))
    return found


def comparison_tables(found: Comparison) -> list[tuple[str, Table]]:
    """Return the tables of a comparison, each with its title; those without a difference are left out."""
    names = [printable(name) for name in found.names]
    overview = _columns(["", *names])
    for title, cells in (
        ("state", [run.state for run in found.statuses]),
        ("progress", [progress(run) for run in found.statuses]),
        ("duration", [duration(run.duration_s) for run in found.statuses]),
    ):
        overview.add_row(title, *cells)
    tables = [("", overview)]
    for title, rows in (("config", found.config), ("environment", found.environment)):
        if rows:
            tables.append((title, _tree(rows, names)))
    if found.metrics:
        table = _columns(["", *names])
        for row in found.metrics:
            values = [_pair(row.name, last, best) for last, best in zip(row.last, row.best, strict=True)]
            if row.winner is not None:
                values[row.winner].stylize("green")
            table.add_row(printable(row.name), *values)
        tables.append(("metrics: last (best)", table))
    return tables


def _tree(rows: Iterable[tuple[str, list[Any]]], names: Sequence[str]) -> Table:
    """Return settings as a nested list: a section is written once."""
    table, before = _columns(["", *names]), list[str]()
    for key, values in rows:
        *sections, own = key.split(".")
        for depth, section in enumerate(sections):
            if before[: depth + 1] != sections[: depth + 1]:
                table.add_row("  " * depth + printable(section), style="dim")
        before = sections
        table.add_row("  " * len(sections) + printable(own), *(printable(plain(value), 60) for value in values))
    return table


def _pair(name: str, last: float | None, best: float | None) -> Text:
    if last is None and best is None:
        return Text(ABSENT)
    text = metric(name, last)
    return Text(text if best is None or best == last else f"{text} ({metric(name, best)})")


def _value(status: RunStatus, one: dict[str, Any] | None, with_name: bool) -> str:
    if not one:
        return ""
    value = one.get("value")
    text = number(value if isinstance(value, (int, float)) else None)
    return f"{label(printable(status.monitor))} {text}" if with_name else text


def _columns(titles: Sequence[str]) -> Table:
    table = _table()
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
