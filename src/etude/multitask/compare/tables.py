"""Tables of comparisons: of one model for all tasks with one for each, and of several weightings."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

MULTI = "multi-task"
"""The name of the run that learns all tasks."""
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
        return MULTI if (difference < 0) == lower_is_better(self.number) else "single-task"

    def summary(self) -> dict[str, Any]:
        """Return what follows from the values."""
        return {"difference": self.difference, "better": self.verdict}

    def cells(self) -> list[str]:
        """Return the values as text."""
        return [spread(self.multi), spread(self.single), f"{self.difference:+.4g}", self.verdict]


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

    def summary(self) -> dict[str, Any]:
        """Return what follows from the values."""
        return {"best": self.best}

    def cells(self) -> list[str]:
        """Return the values as text; the best mean has a star."""
        return [spread(values) + (" *" if name == self.best else "") for name, values in self.values.items()]


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
    """A whole comparison: its runs, a table of their numbers, and what a reader of the table must know."""

    experiment: str
    title: str
    columns: tuple[str, ...]
    """Headings of the cells of a row."""
    settings: Mapping[str, Any]
    """What was compared, for `to_dict`."""
    seeds: tuple[int, ...]
    runs: tuple[ComparedRun, ...]
    rows: tuple[ResultRow, ...] | tuple[WeightingRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the verdict of every row."""
        return {
            "experiment": self.experiment,
            **self.settings,
            "seeds": self.seeds,
            "runs": [asdict(run) for run in self.runs],
            "rows": [asdict(row) | row.summary() for row in self.rows],
        }

    def lines(self) -> list[list[str]]:
        """Return the table as text, the heading first."""
        rows = [[row.task, row.split, row.number, *row.cells()] for row in self.rows]
        return [["task", "split", "number", *self.columns], *rows]

    def to_markdown(self) -> str:
        """Return the table and its notes as Markdown."""
        head, *rows = self.lines()
        lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
        return "\n".join([f"# {self.title}", "", *lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def to_text(self) -> str:
        """Return the table and its notes in columns, for a terminal."""
        table = self.lines()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([*lines, *self.notes])


def spread_note(seeds: Sequence[int]) -> str | None:
    """Return what the numbers of several seeds are, None for one seed."""
    return f"mean ± standard deviation over the seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else None


def task_notes(budget: str, seeds: Sequence[int], runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Return what a reader must know of one model for all tasks and one for each."""
    multi = [run for run in runs if run.name == MULTI]
    single = [run for run in runs if run.name != MULTI]
    steps = [sum(run.steps for run in some) // len(seeds) for some in (multi, single)]
    sizes = [max((run.parameters for run in some), default=0) for some in (multi, single)]
    chance = "one seed: a difference may be chance, so none is called better; try several with --seeds 5"
    if several := spread_note(seeds):
        chance = f"{several}; unclear: 0 lies in the 95 % interval of the mean difference"
    return (
        f"budget {budget}: {_budget_note(budget, multi, single)}",
        f"steps: multi-task {steps[0]:,}, all single-task models together {steps[1]:,}",
        f"parameters: multi-task {sizes[0]:,}, a single-task model up to {sizes[1]:,}",
        chance,
    )


def _budget_note(budget: str, multi: Sequence[ComparedRun], single: Sequence[ComparedRun]) -> str:
    """Return what the single-task models were given, as counted in their runs."""
    if budget == "whole":
        return "each single-task model took as many steps as the multi-task model"
    wanted = {(run.seed, task): samples for run in multi for task, samples in run.samples.items()}
    pairs = [(run.name, run.samples[run.name], wanted[run.seed, run.name]) for run in single]
    others = dict.fromkeys(f"{name} {read:,} instead of {share:,}" for name, read, share in pairs if read != share)
    rounded = f", rounded up to whole steps ({'; '.join(others)})" if others else ""
    return f"each single-task model read as many samples as the multi-task model read for that task{rounded}"


Measured = Mapping[str, Mapping[str, float]]
"""Split → numbers of one run."""


def make_rows(tasks: Iterable[str], found: Mapping[str, Sequence[Measured]]) -> tuple[ResultRow, ...]:
    """Return the rows from the numbers of the runs of each model, one run for each seed.

    >>> made = make_rows(["a"], {"multi-task": [{"test": {"a/loss": 1.0}}], "a": [{"test": {"a/loss": 2.0}}]})
    >>> [(row.number, row.multi, row.single, row.verdict) for row in made]
    [('loss', (1.0,), (2.0,), 'unclear')]
    """
    return tuple(
        ResultRow(task, number, split, values[MULTI], values[task])
        for task in tasks
        for number, split, values in _numbers_of(task, {name: found[name] for name in (MULTI, task)})
    )


def make_weighting_rows(tasks: Iterable[str], found: Mapping[str, Sequence[Measured]]) -> tuple[WeightingRow, ...]:
    """Return the rows from the numbers of every weighting's runs, one run for each seed."""
    return tuple(WeightingRow(task, *numbers) for task in tasks for numbers in _numbers_of(task, found))


def _numbers_of(
    task: str, found: Mapping[str, Sequence[Measured]]
) -> Iterator[tuple[str, str, dict[str, tuple[float, ...]]]]:
    """Yield name, split and values of every number of a task that all runs have: of the test split where it has any."""
    everything = [numbers for runs in found.values() for numbers in runs]
    split = "test" if all(f"{task}/loss" in numbers.get("test", {}) for numbers in everything) else "validation"
    for name in everything[0].get(split, {}):
        prefix, _, number = name.partition("/")
        if prefix == task and number not in _LEFT_OUT and all(name in one.get(split, {}) for one in everything):
            yield number, split, {key: tuple(one[split][name] for one in runs) for key, runs in found.items()}


def lower_is_better(number: str) -> bool:
    """Return whether a smaller value of a number is the better one.

    >>> lower_is_better("perplexity"), lower_is_better("f1")
    (True, False)
    """
    return not LOWER_IS_BETTER.isdisjoint(number.split("_"))


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
