"""Applies a schedule to an optimizer: the learning rate of a step is a pure function of its number."""

import torch
from torch import Tensor

from etude.optim.schedules import Schedule


class LearningRate:
    """Sets the learning rate of every parameter group to its base rate times the schedule's factor.

    The base rates are those the optimizer was made with, so they come from the config and not from a checkpoint.
    Without a schedule and a `scale` the rates are left alone: they are constant, or somebody else sets them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self.scale: float | None = None
        """A further factor of every rate; None: there is nobody who would change it."""
        self._base = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rate of the step about to be taken."""
        if self._schedule is None and self.scale is None:
            return
        factor = 1.0 if self._schedule is None else self._schedule(step)
        factor *= 1.0 if self.scale is None else self.scale
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
