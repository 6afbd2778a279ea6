"""The table of grouped numbers in the progress display: of names such as `quality/loss`, a line for each group.

Groups are the tasks of a run mostly. Pure functions, no terminal in sight.
"""

from dataclasses import dataclass

from etude.callbacks.progress_words import Groups, Line, Numbers, cells, fit, label, metric, number, split_name

MAX_NAME = 24
"""Columns of a group's name at most."""
_GAP = "  "
_KIND = "task"
"""What groups are called in the heading."""
_FIRST = ("perplexity", "f1", "accuracy")
_SETTINGS = frozenset({"weight", "val_weight"})
_NO_METRICS = frozenset({"loss", "nll", "weight", "grad_norm"})


def group_names(groups: Groups, running: bool = True) -> list[str]:
    """Return the groups that have numbers to show; those of a run that goes on, or of its last epoch alone."""
    sources = (groups.numbers, groups.latest if running else {})
    known = ((*split_name(name), value) for source in sources for name, value in source.items())
    return list(dict.fromkeys(group for group, own, value in known if value is not None and own not in _SETTINGS))


def group_table(groups: Groups, width: int, max_rows: int | None = None, running: bool = False) -> list[Line]:
    """Return a heading and one line per group, with the columns that fit; `running` adds the loss of the log point."""
    names = group_names(groups, running)
    if not names:
        return []
    shown = names if max_rows is None or len(names) <= max_rows else names[: max(1, max_rows - 1)]
    corner = f"{_KIND}, {groups.when}" if groups.when else _KIND
    name_width = max(len(corner), *(min(MAX_NAME, cells(name)) for name in shown))
    columns = _fitting(_columns(groups, shown, running), width - name_width - 1)
    lines: list[Line] = [[(f" {corner:<{name_width}}" + "".join(column.heading for column in columns), "dim")]]
    for place, name in enumerate(shown):
        lines.append(
            [(" " + _name(name, name_width), ""), *((column.cell(place), column.style) for column in columns)]
        )
    if len(shown) < len(names):
        lines.append([(f" {len(names) - len(shown)} more {_KIND}s", "dim")])
    return lines


def losses_line(groups: Groups, width: int) -> Line:
    """Return the losses of the last log points on one line, for a terminal too low for a table."""
    losses = [
        (name, value) for name, value in groups.latest.items() if split_name(name)[1] == "loss" and value is not None
    ]
    line: Line = []
    for place, (name, value) in enumerate(losses):
        title, text = f" {split_name(name)[0]} ", f"{number(value)} "
        rest = f" +{len(losses) - place}"
        width -= cells(title) + len(text)
        if width < (len(rest) if place + 1 < len(losses) else 0):
            return [*line, (rest, "dim")]
        line += [(title, "dim"), (text, "")]
    return line


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    texts: list[str]
    rank: int
    """Columns of low rank are the first to be shown."""
    is_left: bool = False
    style: str = ""

    @property
    def width(self) -> int:
        return max(len(self.title), *map(len, self.texts)) + len(_GAP)

    @property
    def heading(self) -> str:
        return self._placed(self.title)

    def cell(self, place: int) -> str:
        return self._placed(self.texts[place])

    def _placed(self, text: str) -> str:
        return (_GAP + text).ljust(self.width) if self.is_left else text.rjust(self.width)


def _columns(groups: Groups, names: list[str], running: bool) -> list[_Column]:
    """Return all columns there is something to say in, in their order."""
    numbers, latest = groups.numbers, groups.latest
    both = {**numbers, **latest} if running else {**latest, **numbers}
    weights = [_weight(both.get(f"{name}/weight")) for name in names]
    columns = [_Column("weight", weights, rank=4)]
    if running:
        columns.append(_Column("loss now", [_text(latest, f"{name}/loss") for name in names], rank=0))
    columns.append(_Column("train loss", [_text(numbers, f"{name}/loss") for name in names], rank=3))
    columns.append(_Column("val loss", [_text(numbers, f"val_{name}/loss") for name in names], rank=1))
    metrics = [_metrics(numbers, name) for name in names]
    for slot in range(max(map(len, metrics))):
        texts = [found[slot] if slot < len(found) else "" for found in metrics]
        columns.append(_Column("", texts, rank=2 if slot == 0 else 5 + slot, is_left=True))
    # Of an epoch only its own: gradients are looked at now and then, and norms of long ago would pass for new ones.
    norms = [_text(both if running else numbers, f"{name}/grad_norm") for name in names]
    columns.append(_Column("grad norm", norms, rank=5, style="dim"))
    return [column for column in columns if any(column.texts)]


def _fitting(columns: list[_Column], room: int) -> list[_Column]:
    chosen = set()
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width <= room:
            room -= column.width
            chosen.add(column.rank)
    return [column for column in columns if column.rank in chosen]


def _metrics(numbers: Numbers, group: str) -> list[str]:
    """Return what there is beside the losses of a group: values of the validation, or else of the training."""
    own = [split_name(name)[1].removeprefix("val_") for name in numbers if split_name(name)[0] == group]
    names = dict.fromkeys([name for name in _FIRST if name in own] + [n for n in own if n not in _NO_METRICS])
    found = []
    for name in names:
        value = numbers.get(f"val_{group}/{name}", numbers.get(f"{group}/{name}"))
        found.append(f"{label(name)} {metric(name, value)}")
    return found


def _text(numbers: Numbers, name: str) -> str:
    return number(numbers[name]) if name in numbers else ""


def _weight(value: float | None) -> str:
    """Return a weight in three decimals, or in three digits if it is very small or large."""
    if value is None:
        return ""
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def _name(name: str, width: int) -> str:
    """Return a name in just so many columns; a long one without its middle, since names often share a beginning."""
    if cells(name) > width:
        end = fit(name[::-1], (width - 2) // 2)[::-1]
        name = fit(name, width - 2 - cells(end)) + ".." + end
    return name + " " * (width - cells(name))
