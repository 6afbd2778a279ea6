"""An exponential moving average of weights, updated on their device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class WeightAverage:
    """The average of parameters over updates: average ← decay · average + (1 − decay) · parameter.

    It is a copy of the parameters up to update `start` (up to the first one by default), and follows only every
    `every`-th update after that.

    >>> weight = torch.nn.Parameter(torch.zeros(1)); mean = WeightAverage([weight], decay=0.75)
    >>> for value in (4.0, 8.0):
    ...     weight.data.fill_(value); mean.update(torch.zeros(()))
    tensor([4.])
    tensor([8.])
    >>> mean.average
    [tensor([5.])]
    """

    def __init__(self, params: Sequence[Tensor], decay: float, start: int = 0, every: int = 1) -> None:
        self.params = list(params)
        self.decay, self.every, self.copies = decay, every, max(start, every)
        self.average = [param.detach().clone() for param in self.params]
        self.count = torch.zeros((), dtype=torch.int64, device=self.params[0].device)
        """Number of updates, without those that were skipped."""

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Follow an update of the parameters, unless `skipped` is 1; on CUDA without waiting for the device."""
        taken = skipped == 0
        self.count.add_(taken)
        weight = self.weight(taken)
        if not weight.is_cpu:
            self.follow(weight)
        elif value := weight.item():  # on the CPU reading a value does not wait
            torch._foreach_lerp_(self.average, self.params, value)

    def weight(self, taken: Tensor) -> Tensor:
        """Return the weight of the parameters in the new average, on the device."""
        copies = self.count <= self.copies
        is_due = taken & (copies | (self.count % self.every == 0))
        return torch.where(copies, 1.0, 1.0 - self.decay) * is_due

    def follow(self, weight: Tensor) -> None:
        """Move the averages towards the parameters by a weight that only the device knows."""
        change = torch._foreach_sub(self.params, self.average)
        torch._foreach_mul_(change, weight.to(change[0].dtype))
        torch._foreach_add_(self.average, change)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and averages, in place."""
        for param, average in zip(self.params, self.average, strict=True):
            kept = param.detach().clone()
            param.copy_(average)
            average.copy_(kept)
