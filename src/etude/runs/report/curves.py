"""The charts of a report: metrics, tasks, optimization and speed, with the events of the runs."""

from collections.abc import Iterable, Sequence
from typing import Any

from etude.callbacks.progress_lines import is_metric, split_name
from etude.monitor.series import RunMetrics
from etude.runs.report.chart import Line, Marks, chart
from etude.runs.report.html import section

_KINDS = (
    ("Optimization", ("lr", "grad_norm", "skipped")),
    ("Speed", ("samples_per_s", "tokens_per_s", "batches_per_s", "mfu", "data_wait")),
)
_MOST_POINTS, _LEAST_POINTS = 400, 40
_POINT_BYTES = 45
"""Bytes that a point takes in the page, about."""
_BUDGET = 1_200_000
"""Bytes for all points, so that a page stays under two megabytes."""
MOST_CHARTS = 240
_BAND = "the band reaches from the lowest to the highest value"
_KEY = (
    f"<p class='muted'>Charts are by step: {_BAND}, phases are shaded, a dashed line is a resume, marks on the axis "
    "are checkpoints, red ones values that were not finite and updates that were skipped.</p>"
)
_KEY_OF_SEVERAL = f"<p class='muted'>Charts are by step: {_BAND}, training is paler than validation.</p>"


def chart_sections(runs: Sequence[RunMetrics], labels: Sequence[str]) -> list[str]:
    """Return the sections with charts. Training is paler than validation; with several runs a colour is a run."""
    names = list(dict.fromkeys(name for run in runs for name in run.names()))
    own = _paired(name for name in names if is_metric(name))
    tasks: dict[str, list[str]] = {}
    for name in names:
        if (group := split_name(name)[0]) and not name.startswith("grad_"):
            tasks.setdefault(group, []).append(name)
    others = [(title, [[name] for name in known if name in names]) for title, known in _KINDS]
    groups = [[name] for name in names if name.startswith("lr/")]
    count = len(runs) * (len(names) or 1)
    points = max(_LEAST_POINTS, min(_MOST_POINTS, _BUDGET // (_POINT_BYTES * count)))
    draw = _Drawer(runs, labels, points)
    metrics = draw.grid(own)
    found = [section("Metrics", (_KEY if len(runs) == 1 else _KEY_OF_SEVERAL) if metrics else "", metrics)]
    found += [section("Tasks", *(draw.grid(_paired(mine), small=True) for mine in tasks.values()))]
    for title, charts in others:
        found.append(section(title, draw.grid([*charts, *(groups if title == "Optimization" else [])])))
    return [one for one in found if one]


class _Drawer:
    def __init__(self, runs: Sequence[RunMetrics], labels: Sequence[str], points: int) -> None:
        self.runs, self.labels, self.points = runs, labels, points
        self.marks = marks_of(runs[0].events) if len(runs) == 1 else Marks()
        self.left = MOST_CHARTS

    def grid(self, charts: Iterable[list[str]], small: bool = False) -> str:
        """Return charts side by side; each has the names of one list."""
        found = [self._chart(names, small) for names in charts]
        return f'<div class="{"grid4" if small else "grid2"}">{"".join(found)}</div>' if any(found) else ""

    def _chart(self, names: list[str], small: bool) -> str:
        if self.left == 0:
            return ""
        lines = [line for place in range(len(self.runs)) for line in self._lines(place, names)]
        title = names[0].removeprefix("val_") if len(names) > 1 else names[0]
        drawn = chart(title, lines, self.marks, self.points // 2 if small else self.points, small=small)
        self.left -= bool(drawn)
        return drawn

    def _lines(self, place: int, names: list[str]) -> list[Line]:
        run, found = self.runs[place], list[Line]()
        several, known = len(self.runs) > 1, set(run.names())
        for number, name in enumerate(names):
            if name not in known:
                continue
            series, is_val = run.series(name), name.startswith("val_")
            if name == "skipped" and not series.y.any():
                continue
            words = [self.labels[place]] * several + ["val" if is_val else "train"] * (len(names) > 1)
            is_pale = several and len(names) > 1 and not is_val
            found.append(Line(" ".join(words) or name, series, place if several else number, is_pale))
        return found


def _paired(names: Iterable[str]) -> list[list[str]]:
    """Return names with their validation: `loss` and `val_loss` share a chart.

    >>> _paired(["loss", "accuracy", "val_loss", "val_f1"])
    [['loss', 'val_loss'], ['accuracy'], ['val_f1']]
    """
    charts: dict[str, list[str]] = {}
    for name in names:
        charts.setdefault(name.removeprefix("val_"), []).append(name)
    return [sorted(mine, key=lambda name: name.startswith("val_")) for mine in charts.values()]


def marks_of(events: Iterable[dict[str, Any]]) -> Marks:
    """Return what a chart marks: phases, resumes, checkpoints and skipped updates."""
    marks = Marks()
    for event in events:
        step = event.get("step")
        if not isinstance(step, (int, float)):
            continue
        kind = event.get("kind")
        if kind == "phase":
            marks.phases.append((float(step), str(event.get("phase") or event.get("message") or "")))
        elif kind == "resume":
            marks.resumes.append(float(step))
        elif kind == "checkpoint":
            marks.checkpoints.append(float(step))
        elif kind == "recovery" and event.get("skipped"):
            marks.skipped.append(float(step))
    marks.phases.sort()
    return marks
