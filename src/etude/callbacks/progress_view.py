"""What the progress display shows, as text with styles: pure functions of a `View`, no terminal in sight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Span = tuple[str, str]
"""Text and its style, in rich's words ("dim", "bold", "cyan" …)."""
Line = list[Span]

MAX_ROWS = 10
"""Finished epochs in the table: the last ones, and the best one if it came earlier."""
MAX_WIDTH = 104
"""Columns used at most: on a wide terminal a line stays within one glance."""

_LABELS = {"accuracy": "acc", "perplexity": "ppl", "grad_norm": "grad norm"}
_NOT_METRICS = frozenset({"step", "epoch", "samples", "lr", "skipped", "data_wait", "grad_norm"})
_MIN_BAR = 8


@dataclass(slots=True)
class Row:
    """A finished epoch."""

    epoch: int
    seconds: float
    numbers: dict[str, float | None]
    """Its metrics; None stands for a number that was not finite."""


@dataclass(slots=True)
class View:
    """Everything there is to show."""

    title: str = ""
    subtitle: str = ""
    total_epochs: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    """Seconds to the end of the run; None if that is not known."""
    record: dict[str, float] = field(default_factory=dict)
    """The numbers of the last log point."""
    rows: list[Row] = field(default_factory=list)
    num_epochs: int = 0
    """Epochs finished, those included that have no row any more."""
    validating: bool = False
    note: str = ""
    outcome: str = ""
    """How the run ended; empty while it runs."""


def is_metric(name: str) -> bool:
    """True for losses and metrics; False for rates, counters and settings.

    >>> [name for name in ("loss", "val_accuracy", "lr", "samples_per_s", "grad_norm_max") if is_metric(name)]
    ['loss', 'val_accuracy']
    """
    return name not in _NOT_METRICS and not name.endswith("_s") and not name.startswith("grad_norm_")


def best_row(rows: list[Row]) -> Row | None:
    """Return the row with the least validation loss (or else the highest accuracy), the first if several are equal."""
    for name, sign in (("val_loss", 1.0), ("val_accuracy", -1.0)):
        known = [(sign * value, row.epoch) for row in rows if (value := row.numbers.get(name)) is not None]
        if known:
            epoch = min(known)[1]
            return next(row for row in rows if row.epoch == epoch)
    return None


def keep_rows(rows: list[Row]) -> list[Row]:
    """Return the last rows, and before them the best one."""
    best = best_row(rows)
    last = rows[-MAX_ROWS:]
    return last if best is None or best in last else [best, *last]


# --- words and numbers


def label(name: str) -> str:
    """Return the short name of a number.

    >>> label("val_accuracy")
    'val acc'
    """
    prefix, base = ("val ", name[4:]) if name.startswith("val_") else ("", name)
    return prefix + _LABELS.get(base, base.replace("_", " "))


def number(value: float | None) -> str:
    """Return a number in at most nine characters.

    >>> number(0.041234), number(4.1e-6), number(1234.5), number(float("nan")), number(7)
    ('0.0412', '4.10e-06', '1234.50', 'nan', '7')
    """
    if value is None or not math.isfinite(value):
        return "nan" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 100 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Return a time in words of the clock.

    >>> duration(4.13), duration(42), duration(63), duration(3723)
    ('4.1 s', '42 s', '1:03', '1:02:03')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def numbers(record: Mapping[str, float | None]) -> list[Span]:
    """Return label and value of each number of a log point worth a glance, most important first."""
    metrics = {name: value for name, value in record.items() if is_metric(name)}
    names = [name for name in ("loss", "accuracy") if name in metrics]
    names += [name for name in metrics if name not in names]
    spans = [(label(name), number(metrics[name])) for name in names]
    if (lr := record.get("lr")) is not None:
        spans.append(("lr", f"{lr:.1e}"))
    if "grad_norm" in record:
        spans.append(("grad norm", number(record["grad_norm"])))
    if rate := record.get("samples_per_s"):
        spans.append(("", f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2f} samples/s"))
    if (wait := record.get("data_wait")) and wait >= 0.05:
        spans.append(("waiting for data", f"{wait:.0%}"))
    if skipped := record.get("skipped"):
        spans.append(("skipped steps", f"{skipped:.0f}"))
    return spans


def of_total(count: int, total: int | None, separator: str = ",") -> str:
    """Return `3/10`, or `3` if the total is not known."""
    pattern = f"{{:{separator}}}"
    return pattern.format(count) + ("" if total is None else "/" + pattern.format(total))


# --- lines for files: no styles, no control characters


def log_line(view: View) -> str:
    """Return the last log point as one line."""
    parts = [
        f"epoch {of_total(view.epoch + 1, view.total_epochs)}",
        f"step {of_total(view.step, view.total_steps, '')}",
    ]
    return "  ".join(parts + [f"{name} {value}".strip() for name, value in numbers(view.record)])


def epoch_line(view: View, row: Row) -> str:
    """Return a finished epoch as one line."""
    parts = [f"epoch {of_total(row.epoch + 1, view.total_epochs)} done in {duration(row.seconds)}"]
    parts += [f"{label(name)} {number(value)}" for name, value in row.numbers.items()]
    return "  ".join(parts + ["(best)"] * (best_row(view.rows) is row))


def outcome_line(view: View) -> str:
    """Return how the run ended, and its best epoch."""
    best = best_row(view.rows)
    parts = [f"{view.outcome} after {duration(view.elapsed_s)}"]
    if best is not None:
        name = "val_loss" if best.numbers.get("val_loss") is not None else "val_accuracy"
        parts.append(f"best {label(name)} {number(best.numbers[name])} in epoch {best.epoch + 1}")
    return ", ".join(parts)


# --- the frame for terminals


def frame(view: View, width: int, height: int, ascii_only: bool = False) -> list[Line]:
    """Return the lines of the display, none wider than `width`."""
    width = min(width - 1, MAX_WIDTH)  # a full last column would make some terminals wrap
    lines: list[Line] = [[(" " + view.title, "bold"), ("  " + view.subtitle, "dim")]]
    rows = min(MAX_ROWS, height - 10)
    if view.rows and rows > 0:
        lines += [[], *_table(view, width, rows, ascii_only)]
    lines.append([])
    if view.outcome:
        lines.append([(" " + outcome_line(view), "bold")])
    else:
        lines += [*_bars(view, width, ascii_only), _numbers_line(view, width)]
    if view.note:
        lines.append([(" " + view.note, "yellow")])
    return [_crop(line, width) for line in lines]


def _table(view: View, width: int, max_rows: int, ascii_only: bool) -> list[Line]:
    best = best_row(view.rows)
    shown = view.rows[-max_rows:]
    if best is not None and best not in shown:
        shown = [best, *shown[1:]]
    columns = _fitting_columns(view.rows, width - 20)
    widths = [max(8, len(title)) + 3 for _, title in columns]
    heads = "".join(title.rjust(size) for (_, title), size in zip(columns, widths, strict=True))
    lines: list[Line] = [[(f"{'epoch':>8}{heads}{'time':>10}", "dim")]]
    mark = "*" if ascii_only else "★"
    for row in shown:
        is_best = row is best
        line: Line = [(f" {mark if is_best else ' '}{row.epoch + 1:>6}", "green" if is_best else "")]
        for (name, _), size in zip(columns, widths, strict=True):
            style = "green" if is_best and name in ("val_loss", "val_accuracy") else ""
            line.append(((number(row.numbers[name]) if name in row.numbers else "").rjust(size), style))
        lines.append([*line, (f"{duration(row.seconds):>10}", "dim")])
    if hidden := view.num_epochs - len(shown):
        dots = "..." if ascii_only else "⋮"
        lines.insert(1, [(f"{dots:>8}   {hidden:,} more", "dim")])
    return lines


def _fitting_columns(rows: list[Row], room: int) -> list[Span]:
    """Return name and title of the columns that fit: loss and accuracy first, the others while there is room."""
    present = dict.fromkeys(name for row in rows for name in row.numbers)
    order = [name for name in ("loss", "accuracy", "val_loss", "val_accuracy") if name in present]
    order += [name for name in present if name not in order]
    columns: list[Span] = []
    for name in order:
        title = label(name) if name.startswith("val_") else f"train {label(name)}"
        room -= max(8, len(title)) + 3
        if room < 0:
            break
        columns.append((name, title))
    return columns


def _bars(view: View, width: int, ascii_only: bool) -> list[Line]:
    epoch_label = f"epoch {of_total(view.epoch + 1, view.total_epochs)}"
    done = view.step_in_epoch
    share = done / view.steps_per_epoch if view.steps_per_epoch else None
    words = "validating" if view.validating else f"{share:.0%}" if share is not None else ""
    lines = [(epoch_label, share, of_total(done, view.steps_per_epoch), words)]
    run_share = view.step / view.total_steps if view.total_steps else None
    left = f"{duration(view.left_s)} left" if view.left_s is not None else f"{duration(view.elapsed_s)} so far"
    lines.append(("run", run_share, of_total(view.step, view.total_steps), left))
    label_width = max(len(line[0]) for line in lines)
    count_width = max(len(line[2]) for line in lines)
    bar_width = width - label_width - count_width - 18
    drawn = []
    for name, part, count, text in lines:
        busy = view.validating and name == epoch_label
        drawn.append(
            [
                (f" {name:<{label_width}}  ", "bold" if name == epoch_label else ""),
                *_bar(part, bar_width, ascii_only),
                (f"  {count:>{count_width}}", ""),
                (f"  {text}", "yellow" if busy else "dim"),
            ]
        )
    return drawn


def _bar(share: float | None, width: int, ascii_only: bool) -> Line:
    if width < _MIN_BAR:
        return []
    full, half, rest = ("#", "", "-") if ascii_only else ("━", "╸", "─")
    halves = round(min(max(share or 0.0, 0.0), 1.0) * width * 2)
    done = full * (halves // 2) + half * (halves % 2)
    return [(done, "cyan"), (rest * (width - len(done)), "bright_black")]


def _numbers_line(view: View, width: int) -> Line:
    line: Line = []
    room = width
    for name, value in numbers(view.record):
        text = f" {name} " if name else " "
        room -= len(text) + len(value) + 2
        if room < -2:
            break
        line += [(text, "dim"), (value + "  ", "")]
    return line


def _crop(line: Line, width: int) -> Line:
    cropped: Line = []
    for text, style in line:
        cropped.append((text[:width], style))
        width -= len(text)
        if width <= 0:
            break
    return [span for span in cropped if span[0]]


def row_state(row: Row) -> dict[str, Any]:
    """Return a row as plain data."""
    return {"epoch": row.epoch, "seconds": row.seconds, "numbers": dict(row.numbers)}
