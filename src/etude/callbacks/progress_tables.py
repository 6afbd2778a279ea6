"""The tables of a progress display as text cells: finished epochs, and groups such as tasks."""

from dataclasses import dataclass

from etude.callbacks import progress_lines as words
from etude.callbacks.progress_lines import EpochRow, Groups, Judges, label, metric, split_name

_IN_COLUMNS = frozenset({"loss", "weight", "nll"})
"""Metrics of a group that have their own column, or none."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A table; the first column of `rows` names the row."""

    titles: list[str]
    rows: list[list[str]]
    best: int | None = None
    """The row that is marked."""


def epoch_cells(all_rows: list[EpochRow], max_metrics: int, max_rows: int, judges: Judges) -> Cells:
    """Return one row per finished epoch; the last column is its phase."""
    best, rows = words.best_row(all_rows, judges), words.keep_rows(all_rows, max_rows, judges)[-max_rows - 1 :]
    names = list(words.worth_showing({name: None for row in all_rows for name in row.numbers}))[:max_metrics]
    has_tokens = any(row.numbers.get("tokens_per_s") for row in all_rows)
    titles = [label(name) if name.startswith("val_") else f"train {label(name)}" for name in names]
    titles = ["epoch", *titles, *["tokens/s"] * has_tokens, "time", "phase" if any(row.phase for row in rows) else ""]
    cells = []
    for row in rows:
        values = [metric(name, row.numbers[name]) if name in row.numbers else "" for name in names]
        values += [words.rate(row.numbers.get("tokens_per_s") or 0.0)] * has_tokens
        mark = "★ " if row is best else ""
        cells.append([f"{mark}{row.epoch + 1}", *values, words.duration(row.seconds), row.phase])
    marked = [place for place, row in enumerate(rows) if row is best]
    return Cells(titles, cells, marked[0] if marked else None)


def group_cells(groups: Groups, running: bool = False) -> Cells:
    """Return one row per group: weight, losses and other metrics; `running` adds those of log points."""
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
    rows = []
    for name, *cells in zip(names, *columns.values(), strict=True):
        shown = ["" if cell is None else words.number(cell) for cell in cells]
        rows.append([name, *shown, _other_numbers(both if running else numbers, name)])
    return Cells([f"task, {groups.when}" if groups.when else "task", *columns, ""], rows)


def _other_numbers(numbers: words.Numbers, group: str) -> str:
    """Return the metrics other than weight and losses: of the validation, or else of the training."""
    own = [split_name(name)[1].removeprefix("val_") for name in numbers if split_name(name)[0] == group]
    found = {name: numbers.get(f"val_{group}/{name}", numbers.get(f"{group}/{name}")) for name in own}
    return "  ".join(f"{label(n)} {metric(n, value)}" for n, value in found.items() if n not in _IN_COLUMNS)
