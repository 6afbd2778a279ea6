"""Tables of comparisons: of one model for all tasks with one for each, and of several weightings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

LOWER_IS_BETTER = frozenset({"loss", "nll", "perplexity", "mse", "rmse", "mae", "error"})
"""Words in the names of numbers that are better if they are lower."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for two-sided 95 % intervals, for 1 … 15 degrees of freedom; beyond, the last one, which is wider."""
_LEFT_OUT = ("penalty", "weight")
"""Numbers about training and not about the task."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One number of one task, from both models, for every seed.

    >>> row = ResultRow("quality", "f1", "test", (0.5, 0.6, 0.56), (0.4, 0.52, 0.47))
    >>> round(row.difference, 3), round(row.margin, 3), row.verdict
    (0.09, 0.025, 'multi-task')
    """

    task: str
    number: str
    split: str
    """The data it was computed on."""
    multi: tuple[float, ...]
    """Of the model that learned all tasks, a value per seed."""
    single: tuple[float, ...]
    """Of the model that learned this task alone."""

    @property
    def difference(self) -> float:
        """How much more the multi-task model has, on average."""
        return fmean(self.multi) - fmean(self.single)

    @property
    def margin(self) -> float:
        """Half of the 95 % interval of the difference, from its spread over the seeds; infinite for one seed."""
        pairs = [one - other for one, other in zip(self.multi, self.single, strict=True)]
        if len(pairs) < 2:
            return math.inf
        return _T_95[min(len(pairs) - 2, len(_T_95) - 1)] * _deviation(pairs) / math.sqrt(len(pairs))

    @property
    def verdict(self) -> str:
        """Which model is better; "unclear" if 0 lies in the 95 % interval of the difference, so always for one seed."""
        difference, margin = self.difference, self.margin
        if difference == margin == 0:
            return "equal"
        if not abs(difference) > margin:  # also if one of them is NaN
            return "unclear"
        return "multi-task" if (difference < 0) == lower_is_better(self.number) else "single-task"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the runs that were compared."""

    name: str
    """multi-task, or the task it learned alone; or the weighting."""
    seed: int
    folder: str
    steps: int
    samples: Mapping[str, int]
    """Samples that each of its tasks learned from."""
    parameters: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole comparison."""

    experiment: str
    budget: str
    seeds: tuple[int, ...]
    runs: tuple[ComparedRun, ...] = ()
    rows: tuple[ResultRow, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with difference and verdict of every row."""
        rows = [asdict(row) | {"difference": row.difference, "better": row.verdict} for row in self.rows]
        return asdict(self) | {"rows": rows}

    def cells(self) -> list[list[str]]:
        """Return the table as text, the heading first."""
        heading = ["task", "split", "number", "multi-task", "single-task", "difference", "better"]
        return [heading] + [
            [
                row.task,
                row.split,
                row.number,
                spread(row.multi),
                spread(row.single),
                f"{row.difference:+.4g}",
                row.verdict,
            ]
            for row in self.rows
        ]

    def notes(self) -> list[str]:
        """Return what a reader of the table must know."""
        multi = [run for run in self.runs if run.name == "multi-task"]
        single = [run for run in self.runs if run.name != "multi-task"]
        steps = [sum(run.steps for run in runs) // len(self.seeds) for runs in (multi, single)]
        sizes = [max((run.parameters for run in runs), default=0) for runs in (multi, single)]
        chance = (
            f"mean ± standard deviation over the seeds {', '.join(map(str, self.seeds))}; unclear: 0 lies in the 95 % "
            f"interval of the mean difference"
            if len(self.seeds) > 1
            else "one seed: a difference may be chance, so none is called better; try several with --seeds 5"
        )
        return [
            f"budget {self.budget}: {self._budget()}",
            f"steps: multi-task {steps[0]:,}, all single-task models together {steps[1]:,}",
            f"parameters: multi-task {sizes[0]:,}, a single-task model up to {sizes[1]:,}",
            chance,
        ]

    def _budget(self) -> str:
        """Return what the single-task models were given, as counted in their runs."""
        if self.budget == "whole":
            return "each single-task model took as many steps as the multi-task model"
        multi = {run.seed: run.samples for run in self.runs if run.name == "multi-task"}
        others = {
            f"{run.name} {run.samples[run.name]:,} instead of {multi[run.seed][run.name]:,}": None
            for run in self.runs
            if run.name != "multi-task" and run.samples[run.name] != multi[run.seed][run.name]
        }
        rounded = f", rounded up to whole steps ({'; '.join(others)})" if others else ""
        return f"each single-task model read as many samples as the multi-task model read for that task{rounded}"

    def to_markdown(self) -> str:
        """Return the table and its notes as Markdown."""
        return as_markdown(f"{self.experiment}: one model for all tasks, or one for each", self.cells(), self.notes())

    def to_text(self) -> str:
        """Return the table and its notes in columns, for a terminal."""
        return as_text(self.cells(), self.notes())


@dataclass(frozen=True, slots=True)
class WeightingRow:
    """One number of one task from every weighting, for every seed.

    >>> WeightingRow("code", "loss", "test", {"static": (1.0, 1.2), "pcgrad": (0.9, 1.0)}).best
    'pcgrad'
    """

    task: str
    number: str
    split: str
    """The data it was computed on."""
    values: Mapping[str, tuple[float, ...]]
    """By weighting, a value per seed."""

    @property
    def best(self) -> str | None:
        """The weighting with the best mean; None if several have it, or no mean is finite."""
        means = {name: fmean(values) for name, values in self.values.items()}
        finite = {name: mean for name, mean in means.items() if math.isfinite(mean)}
        choose = min if lower_is_better(self.number) else max
        best = [name for name, mean in finite.items() if mean == choose(finite.values())]
        return best[0] if len(best) == 1 else None


@dataclass(frozen=True, slots=True)
class WeightingComparison:
    """The same experiment with several weightings."""

    experiment: str
    weightings: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[ComparedRun, ...] = ()
    rows: tuple[WeightingRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the best weighting of every row."""
        return asdict(self) | {"rows": [asdict(row) | {"best": row.best} for row in self.rows]}

    def cells(self) -> list[list[str]]:
        """Return the table as text, the heading first; the best mean of a row has a star."""
        return [["task", "split", "number", *self.weightings]] + [
            [
                row.task,
                row.split,
                row.number,
                *(spread(row.values[name]) + (" *" if name == row.best else "") for name in self.weightings),
            ]
            for row in self.rows
        ]

    def notes(self) -> list[str]:
        """Return what a reader of the table must know."""
        several = len(self.seeds) > 1
        shown = f"mean ± standard deviation over the seeds {', '.join(map(str, self.seeds))}"
        chance = "one seed: a difference may be chance; try several with --seeds 5"
        return [
            f"{shown if several else chance}; * is the best mean of its row",
            "every model after its last step, on the test split where its task has one",
        ]

    def to_markdown(self) -> str:
        """Return the table and its notes as Markdown."""
        return as_markdown(f"{self.experiment} with several weightings", self.cells(), self.notes())

    def to_text(self) -> str:
        """Return the table and its notes in columns, for a terminal."""
        return as_text(self.cells(), self.notes())


Measured = Mapping[str, Mapping[str, float]]
"""Split → numbers of one run."""


def make_rows(
    tasks: Sequence[str], multi: Sequence[Measured], single: Mapping[str, Sequence[Measured]]
) -> tuple[ResultRow, ...]:
    """Return the rows from the numbers of each seed by split: those of the test split where the task has any.

    >>> made = make_rows(["a"], [{"test": {"a/loss": 1.0}}], {"a": [{"test": {"a/loss": 2.0, "loss": 2.0}}]})
    >>> [(row.number, row.multi, row.single, row.verdict) for row in made]
    [('loss', (1.0,), (2.0,), 'unclear')]
    """
    return tuple(
        ResultRow(task, number, split, _values(multi, split, name), _values(single[task], split, name))
        for task in tasks
        for name, number, split in _shared_numbers(task, [*multi, *single[task]])
    )


def make_weighting_rows(tasks: Sequence[str], found: Mapping[str, Sequence[Measured]]) -> tuple[WeightingRow, ...]:
    """Return the rows from the numbers of every weighting's runs, one run for each seed."""
    everything = [numbers for runs in found.values() for numbers in runs]
    return tuple(
        WeightingRow(task, number, split, {one: _values(runs, split, name) for one, runs in found.items()})
        for task in tasks
        for name, number, split in _shared_numbers(task, everything)
    )


def _shared_numbers(task: str, found: Sequence[Measured]) -> list[tuple[str, str, str]]:
    """Return name, name within the task and split of every number of a task that all runs have."""
    split = "test" if all(f"{task}/loss" in numbers.get("test", {}) for numbers in found) else "validation"
    names = {name: name.removeprefix(f"{task}/") for name in found[0].get(split, {}) if name.startswith(f"{task}/")}
    return [
        (name, number, split)
        for name, number in names.items()
        if number not in _LEFT_OUT and all(name in numbers.get(split, {}) for numbers in found)
    ]


def _values(runs: Sequence[Measured], split: str, name: str) -> tuple[float, ...]:
    return tuple(numbers[split][name] for numbers in runs)


def lower_is_better(number: str) -> bool:
    """Return whether a smaller value of a number is the better one.

    >>> lower_is_better("perplexity"), lower_is_better("f1")
    (True, False)
    """
    return not LOWER_IS_BETTER.isdisjoint(number.split("_"))


def as_text(cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return a table and its notes in columns, for a terminal."""
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
    return "\n".join([*lines, *notes])


def as_markdown(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return a table and its notes as Markdown."""
    head, *rows = cells
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
    return "\n".join([f"# {title}", "", *lines, "", *(f"- {note}" for note in notes)]) + "\n"


def spread(values: Sequence[float]) -> str:
    """Return a value, or mean and standard deviation of several.

    >>> spread([0.5]), spread([0.5, 0.7]), spread([0.5, math.inf])
    ('0.5', '0.6 ± 0.14', 'inf ± nan')
    """
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{fmean(values):.4g} ± {_deviation(values):.2g}"


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation; NaN if a value is not finite."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan
