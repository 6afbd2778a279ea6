"""Applies a schedule to an optimizer: the learning rate of a step is a pure function of its number."""

import math
from typing import Any

import torch
from torch import Tensor

from etude.core import TrainingError
from etude.optim.schedules import Schedule


class LearningRate:
    """Sets the learning rate of every parameter group to its base rate times the schedule's factor.

    The base rate of a group is its `initial_lr`, where torch's schedulers keep it too; a group without one gets the
    rate it was made with before the first step. So it outlives this object, and is saved and loaded with the optimizer.
    Without a schedule and a `scale` the rates are left alone: they are constant, or somebody else sets them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, schedule: Schedule | None) -> None:
        """Without an optimizer there is nothing to set."""
        self.optimizer = optimizer
        self.schedule = schedule
        self.scale: float | None = None
        """A further factor of every rate; None: there is nobody who would change it."""
        # A checkpoint that is loaded before the first step may hold rates that a schedule has changed.
        self._made = [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rate of the step about to be taken."""
        if self.optimizer is None or (self.schedule is None and self.scale is None):
            return
        factor: Any = 1.0 if self.schedule is None else self.schedule(step)
        if not (isinstance(factor, Tensor) or _is_factor(factor)):  # reading a tensor would make the host wait
            raise TrainingError(
                f"the schedule gave {factor!r:.60} for step {step}; it must give a factor of the learning rate, a "
                f"finite number of at least 0, for every step from 0 to the end of the run"
            )
        factor *= 1.0 if self.scale is None else self.scale
        for place, group in enumerate(self.optimizer.param_groups):
            rate, base = group["lr"], self._base(place, group)
            if not isinstance(rate, Tensor):
                group["lr"] = float(base) * factor
            elif isinstance(base, Tensor):
                rate.copy_(base).mul_(factor)  # reading it would make the host wait
            else:
                rate.fill_(base * factor)

    def _base(self, place: int, group: dict[str, Any]) -> Tensor | float:
        if "initial_lr" not in group:  # a group that was added later has not been scheduled yet
            group["initial_lr"] = self._made[place] if place < len(self._made) else float(group["lr"])
        base: Tensor | float = group["initial_lr"]
        return base


def _is_factor(value: Any) -> bool:
    try:
        return bool(0 <= value < math.inf)
    except TypeError:
        return False
