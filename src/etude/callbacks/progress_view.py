"""What the progress display shows, as text with styles: pure functions of a `View`, no terminal in sight."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.callbacks.progress_groups import group_names, group_table, losses_line
from etude.callbacks.progress_words import (
    Groups,
    Line,
    Span,
    cells,
    duration,
    fit,
    label,
    left_out,
    metric,
    number,
    numbers,
    of_total,
    rate,
    speed,
    to_ascii,
)

MAX_ROWS = 10
"""Finished epochs in the table: the last ones, and the best one if it came earlier."""
MAX_WIDTH = 104
"""Columns used at most: on a wide terminal a line stays within one glance."""

MAX_LINE = 100
"""Columns of a log line in a file, as far as there is a choice."""

_MIN_BAR = 8
_MIN_ROWS = 3
"""Epochs that stay in sight where groups need the room, and groups for which a table is worth its heading."""
_MAX_PHASE = 22
"""Columns of a phase's name in the table of epochs."""


@dataclass(slots=True)
class Row:
    """A finished epoch."""

    epoch: int
    seconds: float
    numbers: dict[str, float | None]
    """Its metrics; None stands for a number that was not finite."""
    speed: dict[str, float] = field(default_factory=dict)
    """Tokens per second, MFU and the share of the time waiting for data."""
    phase: str = ""
    """The phase it was in, if the run has phases."""


@dataclass(slots=True)
class Phase:
    """A phase of the run.

    >>> Phase(2, "ontology", 4).text, Phase(2).text
    ('phase 2/4 ontology', 'phase 2')
    """

    number: int
    """Counted from 1."""
    name: str = ""
    total: int | None = None

    @property
    def short(self) -> str:
        """Its number."""
        return f"phase {of_total(self.number, self.total)}"

    @property
    def text(self) -> str:
        """Its number and name."""
        return f"{self.short} {self.name}".rstrip()


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
    notices: list[str] = field(default_factory=list)
    """The latest notices of callbacks."""
    groups: Groups = field(default_factory=Groups)
    phase: Phase | None = None
    """The phase under way, if the run has phases."""


def best_row(rows: list[Row]) -> Row | None:
    """Return the row with the least validation loss (or else the highest accuracy), the first if several are equal.

    Only rows of the last phase count: losses of different phases do not compare.
    """
    rows = [row for row in rows if row.phase == rows[-1].phase]
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


# --- lines for files: no styles, no control characters


def log_line(view: View) -> str:
    """Return the last log point as one line; a long one leaves the gradient norm out, and the name of the phase."""
    place = [
        f"epoch {of_total(view.epoch + 1, view.total_epochs)}",
        f"step {of_total(view.step, view.total_steps, '')}",
    ]
    line = ""
    for phase in (view.phase.text, view.phase.short) if view.phase is not None else ("",):
        parts = [place[0], *([phase] if phase else []), place[1]]
        spans = _fitting_numbers(view.record, MAX_LINE - len("  ".join(parts)), gap=2)
        line = "  ".join(parts + [f"{name} {value}".strip() for name, value in spans])
        if len(line) <= MAX_LINE:
            break
    return line


def _fitting_numbers(record: dict[str, float], room: int, gap: int) -> list[tuple[str, str]]:
    """Return label and value of each number; where room is short, speed says more than the gradient norm."""
    spans = numbers(record)
    needed = sum(len(f"{name} {value}".strip()) + gap for name, value in spans)
    if needed > room and record.get("tokens_per_s"):
        spans = [span for span in spans if span[0] != "grad norm"]
    return spans


def validation_line(view: View, metrics: Mapping[str, float]) -> str:
    """Return the numbers of a validation inside an epoch as one line; those of groups are for their table."""
    ours = {name: value for name, value in metrics.items() if "/" not in name and name != "phase"}
    shown = {name: value for name, value in ours.items() if name not in left_out(ours)}
    parts = [f"step {of_total(view.step, view.total_steps, '')}"]
    return "  ".join(parts + [f"{label(name)} {metric(name, value)}" for name, value in shown.items()])


def epoch_line(view: View, row: Row) -> str:
    """Return a finished epoch as one line."""
    parts = [f"epoch {of_total(row.epoch + 1, view.total_epochs)} done in {duration(row.seconds)}"]
    parts += [f"phase {row.phase}"] if row.phase else []
    shown = {name: value for name, value in row.numbers.items() if name not in left_out(row.numbers)}
    if "val_perplexity" in shown:
        shown.pop("perplexity", None)
    parts += [f"{label(name)} {metric(name, value)}" for name, value in shown.items()]
    parts += [f"{name} {value}".strip() for name, value in speed(row.speed) if name != "mfu"]
    return "  ".join(parts + ["(best)"] * (best_row(view.rows) is row))


def group_lines(view: View) -> list[str]:
    """Return the table of groups, to stand below the line of an epoch or a validation."""
    if not view.groups.numbers:
        return []
    table = group_table(view.groups, MAX_LINE - 2)
    return ["  " + "".join(text for text, _ in line).rstrip() for line in table]


def outcome_line(view: View) -> str:
    """Return how the run ended, and its best epoch."""
    best = best_row(view.rows)
    parts = [f"{view.outcome} {'in' if view.outcome == 'finished' else 'after'} {duration(view.elapsed_s)}"]
    if best is not None:
        name = "val_loss" if best.numbers.get("val_loss") is not None else "val_accuracy"
        found = f"best {label(name)} {number(best.numbers[name])}"
        if best.numbers.get("val_perplexity") is not None:
            found += f" (perplexity {metric('perplexity', best.numbers['val_perplexity'])})"
        parts.append(f"{found} in epoch {best.epoch + 1}" + (f" of phase {best.phase}" if best.phase else ""))
    return ", ".join(parts)


# --- the frame for terminals


def frame(view: View, width: int, height: int, ascii_only: bool = False) -> list[Line]:
    """Return the lines of the display, none wider than `width`."""
    width = min(width - 1, MAX_WIDTH)  # a full last column would make some terminals wrap
    phase: Line = [("  " + view.phase.text, "cyan")] if view.phase is not None else []
    lines: list[Line] = [[(" " + view.title, "bold"), *phase, ("  " + view.subtitle, "dim")]]
    notes = _notes(view, width, max(4, height // 8))
    room = height - 10 - max(0, len(notes) - 2)
    groups = _group_lines(view, width, room)
    rows = min(MAX_ROWS, room - len(groups))
    if view.rows and rows > 0:
        lines += [[], *_table(view, width, rows, ascii_only)]
    lines += [*groups, []]
    if view.outcome:
        lines.append([(" " + outcome_line(view), "bold")])
    else:
        lines += [*_bars(view, width, ascii_only), _numbers_line(view, width)]
    lines += [[(" " + part, "yellow")] for part in notes]
    return [_crop(line, width, ascii_only) for line in lines]


def _notes(view: View, width: int, max_lines: int) -> list[str]:
    """Return the notices and the note, wrapped; where they are many, the earliest notices go."""
    wrapped = [textwrap.wrap(note, max(20, width - 2)) for note in (*view.notices, view.note)]
    while len(wrapped) > 2 and sum(map(len, wrapped)) > max_lines:
        wrapped.pop(0)
    return [part for parts in wrapped for part in parts]


def _group_lines(view: View, width: int, room: int) -> list[Line]:
    """Return the table of groups below an empty line; where it is too high, their losses on one line."""
    if not (view.groups.numbers or view.groups.latest):
        return []
    running = not view.outcome
    count = len(group_names(view.groups, running))
    free = room - 2 - min(len(view.rows), _MIN_ROWS)
    if count and free >= min(count, _MIN_ROWS):
        return [[], *group_table(view.groups, width, free, running)]
    losses = losses_line(view.groups, width) if running and room > 2 else []
    return [[], losses] if losses else []


def _table(view: View, width: int, max_rows: int, ascii_only: bool) -> list[Line]:
    best = best_row(view.rows)
    shown = view.rows[-max_rows:]
    if best is not None and best not in shown:
        shown = [best, *shown[1:]]
    has_tokens = any("tokens_per_s" in row.speed for row in view.rows)
    phase_width = max((min(_MAX_PHASE, cells(row.phase)) + 3 for row in shown if row.phase), default=0)
    if phase_width > width - (57 if has_tokens else 46):
        phase_width = 0  # losses come first
    columns = _fitting_columns(view.rows, width - phase_width - (31 if has_tokens else 20))
    widths = [max(8, len(title)) + 3 for _, title in columns]
    heads = "".join(title.rjust(size) for (_, title), size in zip(columns, widths, strict=True))
    heads += "tokens/s".rjust(11) if has_tokens else ""
    lines: list[Line] = [[(f"{'epoch':>8}{heads}{'time':>10}{'   phase' if phase_width else ''}", "dim")]]
    mark = "*" if ascii_only else "★"
    for row in shown:
        is_best = row is best
        line: Line = [(f" {mark if is_best else ' '}{row.epoch + 1:>6}", "green" if is_best else "")]
        for (name, _), size in zip(columns, widths, strict=True):
            style = "green" if is_best and name in ("val_loss", "val_accuracy", "val_perplexity") else ""
            line.append(((metric(name, row.numbers[name]) if name in row.numbers else "").rjust(size), style))
        if has_tokens:
            line.append((f"{rate(row.speed.get('tokens_per_s', 0.0)):>11}", ""))
        phase = "   " + fit(row.phase, phase_width - 3) if phase_width else ""
        lines.append([*line, (f"{duration(row.seconds):>10}{phase}", "dim")])
    if hidden := view.num_epochs - len(shown):
        dots = "..." if ascii_only else "⋮"
        lines.insert(1, [(f"{dots:>8}   {hidden:,} earlier", "dim")])
    return lines


def _fitting_columns(rows: list[Row], room: int) -> list[Span]:
    """Return name and title of the columns that fit; where room is short, losses and validation come first."""
    present = dict.fromkeys(name for row in rows for name in row.numbers)
    second = "perplexity" if "perplexity" in present else "accuracy"
    order: list[str] = [name for name in ("loss", second, "val_loss", f"val_{second}") if name in present]
    order += [name for name in present if name not in (*order, *left_out(present))]
    titles = {name: label(name) if name.startswith("val_") else f"train {label(name)}" for name in order}
    chosen = set()
    for name in sorted(order, key=lambda name: (order.index(name) > 3, name == second)):
        room -= max(8, len(titles[name])) + 3
        if room < 0:
            break
        chosen.add(name)
    return [(name, titles[name]) for name in order if name in chosen]


def _bars(view: View, width: int, ascii_only: bool) -> list[Line]:
    epoch_label = f"epoch {of_total(view.epoch + 1, view.total_epochs)}"
    done = view.step_in_epoch
    share = done / view.steps_per_epoch if view.steps_per_epoch else None
    words = "validating" if view.validating else f"{share:.0%}" if share is not None else ""
    lines = [(epoch_label, share, of_total(done, view.steps_per_epoch), words)]
    run_share = view.step / view.total_steps if view.total_steps else None
    left = f"{duration(view.elapsed_s, tenths=False)} so far"
    if view.left_s is not None:
        left = f"{duration(view.left_s, tenths=False)} left"
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
    for name, value in _fitting_numbers(view.record, width + 2, gap=3):
        text = f" {name} " if name else " "
        room -= len(text) + len(value) + 2
        if room < -2:
            break
        line += [(text, "dim"), (value + "  ", "")]
    return line


def _crop(line: Line, width: int, ascii_only: bool) -> Line:
    cropped: Line = []
    for text, style in line:
        shown = fit(to_ascii(text) if ascii_only else text, width)
        cropped.append((shown, style))
        width -= cells(shown)
    return [span for span in cropped if span[0]]
