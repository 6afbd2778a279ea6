"""The table of a comparison: metrics of every task from several models, over seeds, and which model is better."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

LOWER_IS_BETTER = frozenset({"loss", "nll", "perplexity", "mse", "rmse", "mae", "error"})
"""Words in names of metrics for which lower is better."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for two-sided 95 % intervals, for 1 … 15 degrees of freedom; more use the last, wider one."""

Measured = Mapping[str, Mapping[str, float]]
"""Split → metrics of one run."""


@dataclass(frozen=True, slots=True)
class ComparedNumber:
    """One metric of one task from several models, for every seed.

    >>> multi, single = (0.5, 0.6, 0.56), (0.4, 0.52, 0.47)
    >>> ComparedNumber("quality", "f1", "test", {"multi-task": multi, "single-task": single}).better
    'multi-task'
    """

    task: str
    number: str
    split: str
    """The data it was computed on."""
    values: Mapping[str, tuple[float, ...]]
    """By model, a value per seed."""

    @property
    def better(self) -> str:
        """The model with the best mean, if the 95 % interval of its lead over the next excludes 0; else "unclear"."""
        means = {name: fmean(values) for name, values in self.values.items()}
        if len(means) < 2 or not all(map(math.isfinite, means.values())):
            return "unclear"
        lower = not LOWER_IS_BETTER.isdisjoint(self.number.split("_"))
        best, second, *_ = sorted(means, key=lambda name: means[name] if lower else -means[name])
        low, high = difference_interval(self.values[best], self.values[second])
        return best if low > 0 or high < 0 else "equal" if low == high == 0 else "unclear"


def difference_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean paired difference over seeds; unbounded for one seed."""
    pairs = [one - other for one, other in zip(first, second, strict=True)]
    margin = math.inf
    if len(pairs) > 1:
        margin = _T_95[min(len(pairs) - 2, len(_T_95) - 1)] * stdev(pairs) / math.sqrt(len(pairs))
    return fmean(pairs) - margin, fmean(pairs) + margin


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the compared runs."""

    name: str
    """multi-task, or the only task it learned; or the weighting."""
    seed: int
    folder: str
    steps: int
    samples: Mapping[str, int]
    """Samples that each of its tasks learned from."""
    parameters: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A whole comparison: its runs, a table of their metrics, and notes for the reader."""

    experiment: str
    settings: Mapping[str, Any]
    """What was compared."""
    seeds: tuple[int, ...]
    runs: tuple[ComparedRun, ...]
    rows: tuple[ComparedNumber, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the verdict of every row."""
        return {
            "experiment": self.experiment,
            **self.settings,
            "seeds": self.seeds,
            "runs": [asdict(run) for run in self.runs],
            "rows": [asdict(row) | {"better": row.better} for row in self.rows],
        }

    def lines(self) -> list[list[str]]:
        """Return the table as text, the heading first."""
        models = list(self.rows[0].values) if self.rows else []
        cells = [[spread(row.values[name]) for name in models] for row in self.rows]
        rows = [[row.task, row.split, row.number, *of, row.better] for row, of in zip(self.rows, cells, strict=True)]
        return [["task", "split", "number", *models, "better"], *rows]

    def to_markdown(self) -> str:
        """Return the table and its notes as Markdown."""
        head, *rows = self.lines()
        lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
        return "\n".join([f"# {self.experiment}", "", *lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def to_text(self) -> str:
        """Return the table and its notes in columns, for a terminal."""
        table = self.lines()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([*lines, *self.notes])


def note_on_chance(seeds: Sequence[int]) -> str:
    """Return a note about the number of seeds."""
    if len(seeds) == 1:
        return "one seed: a difference may be chance, so none is significant; use several with --seeds 5"
    shown = f"mean ± standard deviation over the seeds {', '.join(map(str, seeds))}"
    return f"{shown}; unclear: 0 lies in the 95 % interval of the mean difference between the best two"


def make_rows(task: str, found: Mapping[str, Sequence[Measured]]) -> Iterable[ComparedNumber]:
    """Yield the metrics of a task that all runs have, of the test split if possible; one run per seed.

    >>> (row,) = make_rows("a", {"multi-task": [{"test": {"a/loss": 1.0}}], "single-task": [{"test": {"a/loss": 2.0}}]})
    >>> row.number, row.values, row.better
    ('loss', {'multi-task': (1.0,), 'single-task': (2.0,)}, 'unclear')
    """
    runs = [numbers for some in found.values() for numbers in some]
    split = "test" if all(f"{task}/loss" in numbers.get("test", {}) for numbers in runs) else "validation"
    for name in runs[0].get(split, {}):
        prefix, _, number = name.partition("/")
        about_training = number in ("penalty", "weight")
        if prefix == task and not about_training and all(name in one.get(split, {}) for one in runs):
            values = {model: tuple(one[split][name] for one in some) for model, some in found.items()}
            yield ComparedNumber(task, number, split, values)


def spread(values: Sequence[float]) -> str:
    """Return a value, or mean and standard deviation of several.

    >>> spread([0.5]), spread([0.5, 0.7])
    ('0.5', '0.6 ± 0.14')
    """
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return f"{fmean(values):.4g}"
    return f"{fmean(values):.4g} ± {stdev(values):.2g}"
