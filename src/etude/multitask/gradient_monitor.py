"""Monitor gradient norms of the tasks, and which tasks are in conflict."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge

from etude.checkpoint import is_kind, record_of
from etude.config.registry import register
from etude.core.arguments import checked
from etude.engine.callback import Logs, RunInfo
from etude.multitask.gradients import TaskGradients, TaskGradientWatcher

MAX_PAIRS = 3
"""Pairs in conflict that a notice names."""
_SUMS = dict[str, list[float]]
_STATE = record_of("TaskGradients", {"window": _SUMS, "epoch": _SUMS, "report": _SUMS | None})


@dataclass(slots=True)
class TaskGradientReport:
    """Averages over some steps: of tasks with a gradient, and of pairs with gradients in the same step.

    >>> report = TaskGradientReport()
    >>> report.add(("a", "b", "unlabelled"), [[4.0, -3.0, 0.0], [-3.0, 9.0, 0.0], [0.0, 0.0, 0.0]])
    >>> report.norms, report.cosines
    ({'a': 2.0, 'b': 3.0}, {'a/b': -0.5})
    >>> report.text()
    'gradient norms from 2.0000 (a) to 3.0000 (b); in conflict: a/b (cosine -0.50, in 1 of 1 steps)'
    """

    sums: dict[str, list[float]] = field(default_factory=dict)
    """Norms by task and cosines by pair, `a/b` in alphabetical order, for the steps with gradients.

    Each entry is the sum, the number of steps, and the number of steps with a negative cosine.
    """

    def add(self, tasks: tuple[str, ...], products: list[list[float]]) -> None:
        """Add a step. A gradient that is zero (no labels in the batch) or not finite is ignored."""
        squares = {task: products[place][place] for place, task in enumerate(tasks)}
        norms = {task: math.sqrt(square) for task, square in squares.items() if 0 < square < math.inf}
        values = dict(norms)
        for (row, first), (column, second) in itertools.combinations(enumerate(tasks), 2):
            product = products[row][column]
            if first in norms and second in norms and math.isfinite(product):
                # Rounding may exceed -1 or 1 slightly.
                cosine = max(-1.0, min(1.0, product / (norms[first] * norms[second])))
                values["/".join(sorted((first, second)))] = cosine
        for name, value in values.items():
            total, steps, negative = self.sums.get(name, (0.0, 0, 0))
            self.sums[name] = [total + value, steps + 1, negative + (value < 0)]

    @property
    def norms(self) -> dict[str, float]:
        """Mean norm by task."""
        return {name: total / steps for name, (total, steps, _) in self.sums.items() if "/" not in name}

    @property
    def cosines(self) -> dict[str, float]:
        """Mean cosine by pair, `a/b`."""
        return {name: total / steps for name, (total, steps, _) in self.sums.items() if "/" in name}

    @property
    def conflicts(self) -> dict[str, float]:
        """The mean cosine of the pairs that conflict on average, the worst first."""
        return dict(sorted(((name, one) for name, one in self.cosines.items() if one < 0), key=lambda item: item[1]))

    def numbers(self) -> dict[str, float]:
        """Return the averages by their names in records."""
        numbers = {f"{task}/grad_norm": norm for task, norm in self.norms.items()}
        numbers |= {f"grad_cosine/{pair}": cosine for pair, cosine in self.cosines.items()}
        pairs = [self.sums[pair] for pair in self.cosines]
        if pairs:
            numbers["grad_conflicts"] = sum(one[2] for one in pairs) / sum(one[1] for one in pairs)
        return numbers

    def text(self) -> str:
        """Return the report as text: the range of the norms, and the worst conflicts."""
        norms = sorted((norm, task) for task, norm in self.norms.items())
        (least, weakest), (most, strongest) = norms[0], norms[-1]
        words = f"gradient norms from {_short(least)} ({weakest}) to {_short(most)} ({strongest})"
        if not self.cosines:
            return words
        named = []
        for pair, cosine in itertools.islice(self.conflicts.items(), MAX_PAIRS):
            _, steps, negative = self.sums[pair]
            named.append(f"{pair} (cosine {cosine:.2f}, in {negative} of {steps} steps)")
        more = len(self.conflicts) - len(named)
        found = ", ".join(named) or "no two tasks on average"
        return f"{words}; in conflict: {found}" + (f" and {more} more" if more else "")


@register("callback", "task_gradients")
class TaskGradientMonitor(TaskGradientWatcher):
    """Reports how large the gradient of each task is, and which tasks are in conflict.

    It measures the first step and then every `every_steps`-th. In such a step the gradient of each task with respect
    to the shared parameters is computed separately, which takes about one backward pass per task. The products stay
    on the device until the next log point.

    Records of log points get `<task>/grad_norm`, `grad_cosine/<task>/<other task>` (the mean cosine of the angle
    between the two gradients: 1 the same direction, -1 opposite) and `grad_conflicts`, the share of the pairs and
    steps in which the cosine was negative: averages over the measured steps since the last record. At the end of
    every epoch a notice summarises them; `report` then holds the values. A task without labels in a batch has no
    gradient and is not counted; tasks of different streams are compared only if one step has batches of several
    streams.

    >>> monitor = TaskGradientMonitor(every_steps=10)
    >>> monitor.on_task_gradients(TaskGradients(("code", "quality"), torch.tensor([[4.0, -3.0], [-3.0, 9.0]]), step=0))
    >>> monitor.numbers()
    {'code/grad_norm': 2.0, 'quality/grad_norm': 3.0, 'grad_cosine/code/quality': -0.5, 'grad_conflicts': 1.0}
    """

    @checked
    def __init__(self, every_steps: Annotated[int, Ge(1)] = 100) -> None:
        """Set the steps between measurements."""
        super().__init__()
        self.every_steps = every_steps
        self._is_main = True
        self._begin()

    def _begin(self) -> None:
        self.report: TaskGradientReport | None = None
        """The results of the last measured epoch."""
        self._pending: list[TaskGradients] = []
        self._window, self._epoch = TaskGradientReport(), TaskGradientReport()

    def on_train_begin(self, run: RunInfo) -> None:
        """Reset for a new run; a resumed one keeps its state."""
        self._is_main = run.is_main
        if run.clock.step == 0:
            self._begin()

    def wants_task_gradients(self, step: int) -> bool:
        """Return whether a step is measured; it depends only on the step, so a resumed run measures the same ones."""
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
        """Summarise the epoch."""
        self._read()
        found, self._epoch = self._epoch, TaskGradientReport()
        if not found.sums:
            return
        self.report = found
        if self._is_main:
            message = f"epoch {epoch + 1}: {found.text()}"
            self.notify(message, event="task_gradients", norms=found.norms, conflicts=found.conflicts)

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums and the last report."""
        self._read()
        last = None if self.report is None else self.report.sums
        return {"window": self._window.sums, "epoch": self._epoch.sums, "report": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the state of another version is dropped."""
        self._pending.clear()
        if not is_kind(_STATE, state):
            return
        self._window, self._epoch = (TaskGradientReport(dict(state[key])) for key in ("window", "epoch"))
        self.report = None if state["report"] is None else TaskGradientReport(dict(state["report"]))

    def _read(self) -> None:
        """Read the pending products in one transfer, and add them up. Synchronises with the device."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        values = iter(torch.cat([one.products.detach().flatten() for one in pending]).double().tolist())
        for one in pending:
            size = len(one.tasks)
            products = [list(itertools.islice(values, size)) for _ in range(size)]
            self._window.add(one.tasks, products)
            self._epoch.add(one.tasks, products)


def _short(norm: float) -> str:
    return f"{norm:.4f}" if 1e-3 <= norm < 1e3 else f"{norm:.2e}"
