"""Watch how strong the gradients of the tasks are, and which tasks pull against each other."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge

from etude.checkpoint import check_kind, record_of
from etude.config.registry import register
from etude.core import ConfigError
from etude.engine.callback import Logs, RunInfo
from etude.multitask.gradients import TaskGradients, TaskGradientWatcher

Pair = tuple[str, str]
"""Two tasks, by name in the order of the alphabet."""

MAX_PAIRS = 3
"""Pairs in conflict that a notice names."""

_REPORT = record_of("TaskGradientReport", {"tasks": list[list[str | float]], "pairs": list[list[str | float]]})


@dataclass(slots=True)
class Tally:
    """Norms of one task, or cosines of two."""

    total: float = 0.0
    steps: int = 0
    """Steps in which the task, or both, had a gradient."""
    conflicts: int = 0
    """Those of them in which the cosine was negative."""

    def add(self, value: float) -> None:
        """Count a step."""
        self.total += value
        self.steps += 1
        self.conflicts += value < 0

    @property
    def mean(self) -> float:
        """The mean over the steps."""
        return self.total / self.steps


@dataclass(slots=True)
class TaskGradientReport:
    """Averages over some steps. A task is here if it had a gradient, a pair if both had one in the same step.

    >>> report = TaskGradientReport()
    >>> report.add(("a", "b", "unlabelled"), [[4.0, -3.0, 0.0], [-3.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    >>> report.norms, report.cosines
    ({'a': 2.0, 'b': 3.0}, {('a', 'b'): -0.5})
    >>> report.text()
    'gradient norms from 2.0000 (a) to 3.0000 (b); in conflict: a and b (cosine -0.50, in 1 of 1 steps)'
    """

    tasks: dict[str, Tally] = field(default_factory=dict)
    pairs: dict[Pair, Tally] = field(default_factory=dict)

    def add(self, tasks: tuple[str, ...], products: list[list[float]], conflicts: bool = True) -> None:
        """Count a step. A gradient that is zero (no labels in the batch) or not finite has no part in it."""
        squares = {task: products[place][place] for place, task in enumerate(tasks)}
        norms = {task: math.sqrt(square) for task, square in squares.items() if 0 < square < math.inf}
        for task, norm in norms.items():
            self.tasks.setdefault(task, Tally()).add(norm)
        pairs = itertools.combinations(enumerate(tasks), 2) if conflicts else ()
        for (row, first), (column, second) in pairs:
            product = products[row][column]
            if first in norms and second in norms and math.isfinite(product):
                # Rounding may take it a little beyond -1 or 1.
                cosine = max(-1.0, min(1.0, product / (norms[first] * norms[second])))
                pair = (first, second) if first < second else (second, first)
                self.pairs.setdefault(pair, Tally()).add(cosine)

    @property
    def norms(self) -> dict[str, float]:
        """Mean norm by task."""
        return {task: tally.mean for task, tally in self.tasks.items()}

    @property
    def cosines(self) -> dict[Pair, float]:
        """Mean cosine by pair."""
        return {pair: tally.mean for pair, tally in self.pairs.items()}

    @property
    def conflicts(self) -> dict[Pair, Tally]:
        """The pairs that are in conflict on average, the worst first."""
        found = [(tally.mean, pair) for pair, tally in self.pairs.items() if tally.mean < 0]
        return {pair: self.pairs[pair] for _, pair in sorted(found)}

    def numbers(self) -> dict[str, float]:
        """Return the averages by the names they have in records."""
        numbers = {f"{task}/grad_norm": norm for task, norm in self.norms.items()}
        numbers |= {f"grad_cosine/{first}/{second}": cosine for (first, second), cosine in self.cosines.items()}
        if self.pairs:
            looks = sum(tally.steps for tally in self.pairs.values())
            numbers["grad_conflicts"] = sum(tally.conflicts for tally in self.pairs.values()) / looks
        return numbers

    def text(self) -> str:
        """Return the report in words: the range of the norms, and the worst conflicts."""
        norms = sorted((norm, task) for task, norm in self.norms.items())
        (least, weakest), (most, strongest) = norms[0], norms[-1]
        words = f"gradient norms from {_short(least)} ({weakest}) to {_short(most)} ({strongest})"
        if len(norms) == 1:
            words = f"gradient norm {_short(most)} ({strongest})"
        if not self.pairs:
            return words
        found = self.conflicts
        if not found:
            return f"{words}; no two tasks are in conflict on average"
        named = [
            f"{first} and {second} (cosine {tally.mean:.2f}, in {tally.conflicts} of {tally.steps} steps)"
            for (first, second), tally in itertools.islice(found.items(), MAX_PAIRS)
        ]
        more = len(found) - len(named)
        return f"{words}; in conflict: {', '.join(named)}" + (f" and {more} more" if more else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as lists, strings and numbers."""
        return {
            "tasks": [[task, *astuple(tally)] for task, tally in self.tasks.items()],
            "pairs": [[*pair, *astuple(tally)] for pair, tally in self.pairs.items()],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "TaskGradientReport":
        """Return the report that `state_dict` wrote."""
        check_kind(_REPORT, state, "report")
        tasks = {task: Tally(*sums) for task, *sums in state["tasks"]}
        return cls(tasks, {(first, second): Tally(*sums) for first, second, *sums in state["pairs"]})


@register("callback", "task_gradients")
class TaskGradientMonitor(TaskGradientWatcher):
    """Reports how large the gradient of each task is, and which tasks are in conflict.

    It looks at the first step and then at every `every_steps`-th; in such a step the gradient of each task on the
    shared parameters is computed by itself, which takes about one backward pass per task. The products stay on the
    device until the next log point.

    Records of log points get `<task>/grad_norm`, `grad_cosine/<task>/<other task>` (the mean cosine of the angle
    between the two gradients: 1 the same direction, -1 opposite) and `grad_conflicts`, the share of the pairs and
    steps in which the cosine was negative: averages over the looks since the last record. At the end of every epoch
    a notice sums it up; `report` then holds its numbers. A task that has no labels in a batch has no gradient there,
    and is not counted; tasks that learn from different streams meet in one step only if its batches are of several.

    >>> monitor = TaskGradientMonitor(every_steps=10)
    >>> monitor.on_task_gradients(TaskGradients(("code", "quality"), torch.tensor([[4.0, -3.0], [-3.0, 9.0]]), step=0))
    >>> monitor.numbers()
    {'code/grad_norm': 2.0, 'quality/grad_norm': 3.0, 'grad_cosine/code/quality': -0.5, 'grad_conflicts': 1.0}
    """

    def __init__(self, every_steps: Annotated[int, Ge(1)] = 100, conflicts: bool = True) -> None:
        """Set which steps are measured and what is reported.

        Args:
            every_steps: steps between measurements.
            conflicts: report the cosines of all pairs of tasks too; if not, the norms alone.
        """
        super().__init__()
        if every_steps < 1:
            raise ConfigError(f"TaskGradientMonitor: every_steps is at least 1, found {every_steps}")
        self.every_steps = every_steps
        self.conflicts = conflicts
        self.report: TaskGradientReport | None = None
        """What was seen in the last epoch that was looked at."""
        self._is_main = True
        self._begin()

    def _begin(self) -> None:
        self.report = None
        self._pending: list[TaskGradients] = []
        self._window, self._epoch = TaskGradientReport(), TaskGradientReport()

    def on_train_begin(self, run: RunInfo) -> None:
        """Forget an earlier run; one that goes on keeps what it knows."""
        self._is_main = run.is_main
        if run.clock.step == 0:
            self._begin()

    def wants_task_gradients(self, step: int) -> bool:
        """Return whether a step is measured; it depends on the step alone, so a resumed run measures the same ones."""
        return step % self.every_steps == 0

    def on_task_gradients(self, gradients: TaskGradients) -> None:
        """Keep the products on the device."""
        self._pending.append(gradients)

    def numbers(self) -> Logs:
        """Return the averages since the last log point; none if no step was measured."""
        self._read()
        window, self._window = self._window, TaskGradientReport()
        return window.numbers()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Sum up the epoch."""
        self._read()
        found, self._epoch = self._epoch, TaskGradientReport()
        if not found.tasks:
            return
        self.report = found
        if self._is_main:
            conflicts = [
                {"tasks": list(pair), "cosine": tally.mean, "steps": tally.conflicts, "of": tally.steps}
                for pair, tally in found.conflicts.items()
            ]
            message = f"epoch {epoch + 1}: {found.text()}"
            self.notify(message, event="task_gradients", norms=found.norms, conflicts=conflicts)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums in flight and the last report."""
        self._read()
        last = None if self.report is None else self.report.state_dict()
        return {"window": self._window.state_dict(), "epoch": self._epoch.state_dict(), "report": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._pending.clear()
        self._window = TaskGradientReport.from_state(state["window"])
        self._epoch = TaskGradientReport.from_state(state["epoch"])
        self.report = None if state["report"] is None else TaskGradientReport.from_state(state["report"])

    def _read(self) -> None:
        """Read the products since the last time in one transfer, and add them up. Waits for the device."""
        pending, self._pending = self._pending, []
        for tasks, products in _products(pending):
            self._window.add(tasks, products, self.conflicts)
            self._epoch.add(tasks, products, self.conflicts)


def _products(looks: list[TaskGradients]) -> Iterable[tuple[tuple[str, ...], list[list[float]]]]:
    if not looks:
        return
    values = iter(torch.cat([look.products.detach().flatten() for look in looks]).double().tolist())
    for look in looks:
        size = len(look.tasks)
        yield look.tasks, [list(itertools.islice(values, size)) for _ in range(size)]


def _short(norm: float) -> str:
    return f"{norm:.4f}" if 1e-3 <= norm < 1e3 else f"{norm:.2e}"
