"""The learning-rate range test (Smith 2017): the loss while the rate rises from tiny to huge, and a suggestion."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from etude.core import Batch, ConfigError, Loader, StepReport, Task, TrainingError
from etude.core.arguments import as_whole
from etude.engine.state import TrainState
from etude.engine.step import GradientAccumulator, Step
from etude.engine.step_log import StepLog
from etude.engine.trial import trial

FEWEST = 20
"""Steps below which a curve says nothing."""
_MEMORY = 0.9
"""Weight of earlier losses in the smoothed loss."""
_CLEARLY = 3.0
"""Standard deviations by which the smoothed loss must fall."""
_WINDOW = 0.1
"""Part of the steps over which the slope is measured."""


@dataclass(frozen=True, slots=True)
class RateSearch:
    """The losses of a range test by learning rate, and the rates that follow from them."""

    rates: list[float]
    """The rate of the first parameter group with a rate above 0, in each step."""
    losses: list[float]
    smoothed: list[float]
    base: float
    """The rate that this group was made with."""
    diverged: bool = False
    """Whether the test ended early because the loss rose."""
    steepest: float | None = field(init=False)
    """The rate at which the loss falls fastest; None if it never falls."""
    tenth: float | None = field(init=False)
    """A tenth of the rate with the lowest loss."""

    def __post_init__(self) -> None:
        steepest, lowest = _steepest(self.rates, self.losses, self.smoothed)
        object.__setattr__(self, "steepest", steepest)
        object.__setattr__(self, "tenth", None if steepest is None or lowest is None else _rounded(lowest / 10))

    @property
    def suggestion(self) -> float | None:
        """The rate to train with: where the loss falls fastest, but not above a tenth of that with the lowest loss.

        Beyond it training is near divergence. None if the loss never falls.
        """
        return None if self.steepest is None or self.tenth is None else min(self.steepest, self.tenth)

    def explanation(self) -> str:
        """Return one sentence about the suggestion, or about why there is none."""
        if self.suggestion is None:
            return (
                f"no learning rate between {self.rates[0]:.2g} and {self.rates[-1]:.2g} makes the loss fall clearly "
                f"(first {self.smoothed[0]:.4g}, lowest {min(self.smoothed):.4g}): try more steps, other limits or "
                "larger batches, or look for a mistake in the data or the loss"
            )
        end = f"; it rises beyond {self.rates[-1]:.2g}" if self.diverged else ""
        steepest, tenth = f"the loss falls fastest at {self.steepest:.2g}", f"a tenth of the best is {self.tenth:.2g}"
        which = "the first" if self.suggestion == self.steepest else "the second"
        return f"{steepest}, {tenth}{end}; suggested is {which}, the smaller one, which leaves a margin to divergence"


def range_test(
    state: TrainState,
    step: Step,
    loader: Loader,
    accumulator: GradientAccumulator,
    *,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    steps: int = 100,
) -> RateSearch:
    """Train `steps` steps with a rate that rises exponentially, and undo them.

    The rates of several parameter groups keep their ratios. A warm-up of the optimizer itself is left out. It ends
    early if the loss diverges. Raises ConfigError for impossible limits, TrainingError if already the first loss is
    not finite.
    """
    steps = as_whole("steps", steps, least=FEWEST)
    if not (0 < min_lr < max_lr < math.inf):
        raise ConfigError(f"the rates must satisfy 0 < min < max, found {min_lr:g} and {max_lr:g}")
    groups = step.updater.optimizer.param_groups
    made = [float(group.get("initial_lr", group["lr"])) for group in groups]
    base = next((rate for rate in made if rate > 0), 1.0)
    ratios = [rate / base for rate in made] if any(made) else [1.0] * len(groups)
    rates = [min_lr * (max_lr / min_lr) ** (place / (steps - 1)) for place in range(steps)]
    curve = _Curve(step.task)
    diverged = False
    with trial(state, step) as run:
        for group in groups:
            group |= {"warmup_steps": 0} if "warmup_steps" in group else {}  # of a schedule-free optimizer
        for rate, batches in zip(rates, _batches(loader, accumulator, state), strict=False):
            for group, ratio in zip(groups, ratios, strict=True):
                _set_rate(group, rate * ratio)
            means = _means_of(StepLog(state.world), run(batches))
            if diverged := means is None:
                break
            curve.add(means)
            if diverged := _has_diverged(curve.smooth):
                break
    if not (losses := curve.losses):
        raise TrainingError(
            f"the loss is not finite in the first step, at a rate of {min_lr:g}: look for NaN in the data or the model"
        )
    return RateSearch(rates[: len(losses)], losses, curve.smooth, base, diverged)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(lr := group["lr"], Tensor):
        lr.fill_(rate)
    else:
        group["lr"] = rate


def _batches(loader: Loader, accumulator: GradientAccumulator, state: TrainState) -> Iterator[list[Batch]]:
    """Yield the batches of steps from the position of the run on, epoch after epoch."""
    epoch, position = state.clock.epoch, state.clock.position
    while True:
        batches = loader.iterate(epoch, position)
        try:
            groups = accumulator.group(batches, epoch)
            if not (first := list(islice(groups, 1))) and position == 0:
                return
            yield from first
            yield from groups
        finally:
            batches.close()
        epoch, position = epoch + 1, 0


def _means_of(log: StepLog, report: StepReport) -> dict[str, float] | None:
    """Return the averages of a step over all ranks, of terms that it had; None if its loss is not finite."""
    log.add(report)
    log.flush()  # an intended synchronisation
    if log.window.bad_losses:
        return None
    return {name: value for name, value in log.window.means().items() if not math.isnan(value)}


class _Curve:
    """The loss of a test by step. Steps may have different tasks: each counts with its value in its last step.

    Before the first step of a task, where the rate is still tiny, its first value is taken.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seen: list[dict[str, float]] = []
        self._last: dict[str, float] = {}
        self.losses: list[float] = []
        self.smooth: list[float] = []

    def add(self, means: dict[str, float]) -> None:
        """Add a step; raise TrainingError if it has no loss."""
        self._seen.append(means)
        if means.keys() <= self._last.keys():
            self._append(means)
            return
        self._last, self.losses, self.smooth = {}, [], []
        for one in reversed(self._seen):  # the first value of each name remains
            self._last |= one
        for one in self._seen:
            self._append(one)

    def _append(self, means: dict[str, float]) -> None:
        self._last |= means
        self.losses.append(self._loss())
        # the average so far, with weights that decay exponentially and sum to 1
        weights = _MEMORY ** np.arange(len(self.losses))[::-1]
        self.smooth.append(float(weights @ np.array(self.losses) / weights.sum()))

    def _loss(self) -> float:
        """Return the loss of the run, or the sum of those of its tasks."""
        found = self._task.summary(self._last)
        if "loss" in found:
            return float(found["loss"])
        if not (losses := [value for name, value in self._last.items() if name.endswith("loss")]):
            raise TrainingError(
                f"there is no loss to compare rates by: the task reports {', '.join(self._last) or 'nothing'}; name "
                "one of its terms 'loss'"
            )
        return sum(losses)


def _has_diverged(smooth: list[float]) -> bool:
    first, best = smooth[0], min(smooth)
    return smooth[-1] > best + max(2 * (first - best), 0.5 * abs(first))


def _steepest(rates: list[float], losses: list[float], smooth: list[float]) -> tuple[float | None, float | None]:
    """Return the rate at which the smoothed loss falls fastest on its way to the minimum, and that of the minimum.

    None if the loss falls less than it varies from batch to batch while the rate is still tiny, or is lowest there.
    """
    lowest, width = int(np.argmin(smooth)), max(3, int(_WINDOW * len(rates)))
    early = np.array(losses[: max(3, len(losses) // 5)])
    varies = (np.array(losses) - np.array(smooth))[: lowest + 1].std()
    # of the difference between the mean of the early losses and a smoothed loss
    noise = varies * math.sqrt(1 / len(early) + (1 - _MEMORY) / (1 + _MEMORY))
    if lowest < max(width, len(early)) or early.mean() - smooth[lowest] <= _CLEARLY * noise:
        return None, None
    x, y = np.log(rates[: lowest + 1]), np.array(smooth[: lowest + 1])
    slopes = [np.polyfit(x[i : i + width], y[i : i + width], 1)[0] for i in range(len(x) - width + 1)]
    middle = int(np.argmin(slopes)) + width // 2
    return _rounded(rates[middle]), rates[lowest]


def _rounded(rate: float) -> float:
    """Return a rate with two digits."""
    return float(f"{rate:.1e}")
