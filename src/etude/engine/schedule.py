"""Applies a schedule to an optimizer: the learning rate of a step is a pure function of its number."""

import torch
from torch import Tensor

from etude.optim.schedules import Schedule


class LearningRate:
    """Sets the learning rate of every parameter group to its base rate times the schedule's factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
        self._groups = optimizer.param_groups
        self._schedule = schedule
        for group in self._groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def set(self, step: int) -> None:
        """Set the rate of the step about to be taken."""
        if self._schedule is None:
            return
        factor = self._schedule(step)
        for group in self._groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor
