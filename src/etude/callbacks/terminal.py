"""The progress view in rich's tables and bars, drawn on a terminal without a thread of its own."""

import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment, SegmentLines
from rich.style import Style

from etude.callbacks import progress_words as words
from etude.callbacks.progress_view import MAX_LINE, MAX_ROWS, Groups, View, best_row, outcome_line
from etude.callbacks.progress_words import Numbers, label, metric, number, split_name

Line = list[Segment]

MAX_WIDTH = 104
"""Columns used at most: on a wide terminal a line stays within one glance."""
MAX_NAME = 24
"""Columns of the name of a group or a phase in a table at most."""
_MIN_BAR = 8
_MIN_ROWS = 3
"""Epochs that stay in sight where groups need the room, and groups for which a table is worth its heading."""
_GAP = 2
_FIRST = ("perplexity", "f1", "accuracy")
_SETTINGS = frozenset({"weight", "val_weight"})
_NO_METRICS = frozenset({"loss", "nll", "weight", "grad_norm"})


class LiveTerminal:
    """A region at the bottom of the terminal that is redrawn in place; what is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
        self._lines: list[Line] = []
        self._width = 0
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            # A stream that goes to a file stays there.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def draw(self, view: View) -> None:
        """Draw the view in place of the last one."""
        # If the terminal has become narrower, its lines have wrapped: go up past the parts rich does not know of.
        before, self._width = self._width, self._console.width
        if self._width < before:
            wrapped = sum(max(0, Segment.get_line_length(line) - 1) // self._width for line in self._lines)
            moves = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * wrapped
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2), *moves))
        self._lines = frame(view, self._console)
        self._live.update(SegmentLines(self._lines, new_lines=True), refresh=True)

    def stop(self) -> None:
        """Leave the last picture, and give back the cursor, stdout and stderr."""
        with suppress(OSError, ValueError):  # the terminal may be gone; rich has given back the streams by then
            self._live.stop()


def frame(view: View, console: Console) -> list[Line]:
    """Return the lines of the display, none wider than the terminal."""
    options = console.options
    width, height = min(options.size.width - 1, MAX_WIDTH), options.size.height  # in the last column some would wrap
    phase = view.phase.text if view.phase is not None else ""
    lines = [
        _line((f" {view.title}", "bold"), (f"  {phase}" if phase else "", "cyan"), (f"  {view.subtitle}", "dim"))
    ]
    notes = _notes(view, width, max(4, height // 8))
    room = height - 10 - max(0, len(notes) - 2)
    groups = _group_lines(view, width, room)
    if view.rows and (rows := min(MAX_ROWS, room - len(groups))) > 0:
        lines += [[], *epoch_table(view, width, rows, options.ascii_only)]
    lines += [*groups, []]
    if view.outcome:
        lines.append(_line((f" {outcome_line(view)}", "bold")))
    else:
        lines += [*_bars(view, width, console, options), _numbers_line(view, width)]
    lines += [_line((f" {note}", "yellow")) for note in notes]
    if options.ascii_only:
        lines = [[Segment(words.to_ascii(text), style) for text, style, _ in line] for line in lines]
    return [Segment.adjust_line_length(line, width, pad=False) for line in lines]


def _line(*spans: tuple[str, str]) -> Line:
    return list(Segment.simplify(Segment(text, Style.parse(style)) for text, style in spans if text))


def _notes(view: View, width: int, max_lines: int) -> list[str]:
    """Return the notices and the note, wrapped; where they are many, the earliest notices go."""
    wrapped = [textwrap.wrap(note, max(20, width - 2)) for note in (*view.notices, view.note)]
    while len(wrapped) > 2 and sum(map(len, wrapped)) > max_lines:
        wrapped.pop(0)
    return [part for parts in wrapped for part in parts]


def _bars(view: View, width: int, console: Console, options: ConsoleOptions) -> list[Line]:
    epoch, per_epoch = f"epoch {words.of_total(view.epoch + 1, view.total_epochs)}", view.steps_per_epoch
    share = "validating" if view.validating else f"{view.step_in_epoch / per_epoch:.0%}" if per_epoch else ""
    seconds, when = (view.elapsed_s, "so far") if view.left_s is None else (view.left_s, "left")
    time = f"{words.duration(seconds, tenths=False)} {when}"
    bars = ((epoch, view.step_in_epoch, per_epoch, share), ("run", view.step, view.total_steps, time))
    counts = [words.of_total(count, total) for _, count, total, _ in bars]
    size = width - len(epoch) - max(map(len, counts)) - 18
    lines = []
    for name, count, total, text in bars:
        done = min(count / total, 1.0) if total else 0.0
        bar = ProgressBar(1.0, done, size, style="bright_black", complete_style="cyan", finished_style="cyan")
        parts = bar.__rich_console__(console, options) if size >= _MIN_BAR else ()
        drawn = [part for part in parts if isinstance(part, Segment)]
        end = f"  {words.of_total(count, total):>{max(map(len, counts))}}"
        style = "yellow" if text == "validating" else "dim"
        start = _line((f" {name:<{len(epoch)}}  ", "bold" if name == epoch else ""))
        rest = " " * (size - Segment.get_line_length(drawn)) if drawn else ""
        lines.append([*start, *drawn, *_line((rest + end, ""), (f"  {text}", style))])
    return lines


def _numbers_line(view: View, width: int) -> Line:
    spans: list[tuple[str, str]] = []
    room = width + 2
    for name, value in words.log_spans(view.record, width + 2, gap=3):
        spans += [(f" {name} " if name else " ", "dim"), (f"{value}  ", "")]
        room -= len(spans[-2][0]) + len(spans[-1][0])
        if room < 0:
            return _line(*spans[:-2])
    return _line(*spans)


# --- tables


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cells: tuple[str, ...]
    rank: float = 0
    """Columns of low rank are the first to be shown; those of rank 0 always are."""
    is_left: bool = False
    style: str = ""


def table(columns: Sequence[Column], width: int, best: int | None = None) -> list[Line]:
    """Return a heading and the rows of those columns that fit; row `best` is green.

    Laid out by hand: rich's own takes 60 times as long, 13 ms for seven tasks at every log point.
    """
    sizes: dict[int, int] = {}
    for place, column in sorted(enumerate(columns), key=lambda pair: pair[1].rank):
        size = max(map(cell_len, (column.title, *column.cells))) + _GAP * (place > 0)
        if column.rank == 0 or size <= width:
            width -= size
            sizes[place] = size
    lines: list[Line] = []
    for row in range(-1, len(columns[0].cells)):
        spans = []
        for place, size in sorted(sizes.items()):
            column = columns[place]
            text = " " * _GAP * (place > 0) + (column.cells[row] if row >= 0 else column.title)
            space = " " * (size - cell_len(text))
            style = "dim" if row < 0 else "green" if row == best else column.style
            spans.append((text + space if column.is_left else space + text, style))
        lines.append(_line(*spans))
    return lines


def epoch_table(view: View, width: int, max_rows: int, ascii_only: bool) -> list[Line]:
    """Return a heading and one line per finished epoch; where room is short, losses and validation come first."""
    best, rows = best_row(view.rows), view.rows[-max_rows:]
    if best is not None and best not in rows:
        rows = [best, *rows[1:]]
    mark, dots = ("*", "...") if ascii_only else ("★", "⋮")
    columns = [Column("epoch", tuple(f" {mark if row is best else ' '}{row.epoch + 1:>6}" for row in rows))]
    names = list(words.worth_showing({name: None for row in view.rows for name in row.numbers}, ordered=True))
    for place, name in enumerate(names):
        title = label(name) if name.startswith("val_") else f"train {label(name)}"
        cells = tuple(metric(name, row.numbers[name]) if name in row.numbers else "" for row in rows)
        is_first = name in ("loss", "val_loss")
        columns.append(Column(title.rjust(9), cells, 1 if is_first else 3 if name.startswith("val_") else 4 + place))
    if any("tokens_per_s" in row.speed for row in view.rows):
        columns.append(Column("tokens/s", tuple(words.rate(row.speed.get("tokens_per_s", 0.0)) for row in rows)))
    columns.append(Column("time", tuple(f"{words.duration(row.seconds):>8}" for row in rows), style="dim"))
    if any(row.phase for row in rows):
        columns.append(Column("phase", tuple(_short(row.phase) for row in rows), 2, True, "dim"))
    lines = table(columns, width, rows.index(best) if best is not None else None)
    if hidden := view.rows[-1].epoch + 1 - len(rows):
        lines.insert(1, _line((f"{dots:>8}   {hidden:,} earlier", "dim")))
    return lines


def group_names(groups: Groups, running: bool = True) -> list[str]:
    """Return the groups that have numbers to show; those of a run that goes on, or of its last epoch alone."""
    known = [*groups.numbers.items(), *(groups.latest.items() if running else ())]
    parts = [split_name(name) for name, value in known if value is not None]
    return list(dict.fromkeys(group for group, own in parts if own not in _SETTINGS))


def group_table(groups: Groups, width: int, max_rows: int | None = None, running: bool = False) -> list[Line]:
    """Return a heading and one line per group, with the columns that fit; `running` adds the loss of the log point."""
    names = group_names(groups, running)
    if not names:
        return []
    shown = names if max_rows is None or len(names) <= max_rows else names[: max(1, max_rows - 1)]
    lines = table(_group_columns(groups, shown, running), width)
    if len(shown) < len(names):
        lines.append(_line((f" {len(names) - len(shown)} more tasks", "dim")))
    return lines


def group_texts(groups: Groups) -> list[str]:
    """Return the table of groups for a file, to stand below the line of an epoch or a validation."""
    found = group_table(groups, MAX_LINE - 2) if groups.numbers else []
    return ["  " + "".join(segment.text for segment in line).rstrip() for line in found]


def _group_columns(groups: Groups, names: list[str], running: bool) -> list[Column]:
    """Return all columns there is something to say in, in their order."""
    numbers, latest = groups.numbers, groups.latest
    both = {**numbers, **latest} if running else {**latest, **numbers}

    def texts(source: Numbers, own: str) -> tuple[str, ...]:
        return tuple(number(source[key]) if (key := own.format(name)) in source else "" for name in names)

    metrics = [_metrics(numbers, name) for name in names]
    columns = [
        Column("weight", tuple(_weight(both.get(f"{name}/weight")) for name in names), 5),
        Column("loss now", texts(latest if running else {}, "{}/loss"), 1),
        Column("train loss", texts(numbers, "{}/loss"), 4),
        Column("val loss", texts(numbers, "val_{}/loss"), 2),
    ]
    for slot in range(max(map(len, metrics))):
        cells = tuple(found[slot] if slot < len(found) else "" for found in metrics)
        columns.append(Column("", cells, 3 if slot == 0 else 6 + slot, True))
    # Of an epoch only its own: gradients are looked at now and then, and norms of long ago would pass for new ones.
    columns.append(Column("grad norm", texts(both if running else numbers, "{}/grad_norm"), 6, style="dim"))
    corner = f" task, {groups.when}" if groups.when else " task"
    first = Column(corner, tuple(f" {_short(name)}" for name in names), is_left=True)
    return [first, *(column for column in columns if any(column.cells))]


def _metrics(numbers: Numbers, group: str) -> list[str]:
    """Return what there is beside the losses of a group: values of the validation, or else of the training."""
    own = [split_name(name)[1].removeprefix("val_") for name in numbers if split_name(name)[0] == group]
    names = dict.fromkeys([name for name in _FIRST if name in own] + [n for n in own if n not in _NO_METRICS])
    found = {name: numbers.get(f"val_{group}/{name}", numbers.get(f"{group}/{name}")) for name in names}
    return [f"{label(name)} {metric(name, value)}" for name, value in found.items()]


def _group_lines(view: View, width: int, room: int) -> list[Line]:
    """Return the table of groups below an empty line; where it is too high, their losses on one line."""
    running = not view.outcome
    count = len(group_names(view.groups, running))
    free = room - 2 - min(len(view.rows), _MIN_ROWS)
    if count and free >= min(count, _MIN_ROWS):
        return [[], *group_table(view.groups, width, free, running)]
    losses = losses_line(view.groups, width) if running and room > 2 else ""
    return [[], _line((losses, ""))] if losses else []


def losses_line(groups: Groups, width: int) -> str:
    """Return the losses of the last log points on one line, for a terminal too low for a table."""
    known = [(*split_name(name), value) for name, value in groups.latest.items() if value is not None]
    losses = [f" {group} {number(value)} " for group, own, value in known if own == "loss"]
    for hidden in range(len(losses) + 1):
        line = "".join(losses[: len(losses) - hidden]) + (f" +{hidden}" if hidden else "")
        if cell_len(line) <= width:
            break
    return line


def _weight(value: float | None) -> str:
    """Return a weight in three decimals, or in three digits if it is very small or large."""
    if value is None:
        return ""
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def _short(name: str) -> str:
    """Return a name, a long one without its middle, since names often share a beginning."""
    if cell_len(name) <= MAX_NAME:
        return name
    half = (MAX_NAME - 2) // 2
    return f"{set_cell_size(name, half)}..{set_cell_size(name[::-1], half)[::-1]}"
