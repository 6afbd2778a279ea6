"""Dynamic weight average (Liu, Johns and Davison 2019): tasks whose loss falls more slowly count more."""

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.config.registry import register
from etude.multitask.weighting.base import Weighting, is_active, positive, scaled


@register("weighting", "dwa")
class DynamicWeightAverage(Weighting):
    """K·softmax(r / temperature) over the K active tasks, where r is the last epoch's loss over that of the one before.

    A task with fewer than two epochs behind it has r = 1.

    >>> weighting = DynamicWeightAverage(["a", "b"])
    >>> weighting.end_epoch(torch.tensor([2.0, 2.0])); weighting.end_epoch(torch.tensor([1.0, 2.0]))
    >>> [round(weight, 4) for weight in weighting.coefficients(torch.tensor([1.0, 2.0])).tolist()]
    [0.8756, 1.1244]
    """

    last: Tensor
    before: Tensor

    def __init__(self, tasks: Sequence[str], temperature: float = 2.0) -> None:
        super().__init__(tasks)
        self.temperature = positive(temperature, "temperature")
        for name in ("last", "before"):
            self.register_buffer(name, torch.zeros(len(self.tasks)))

    @torch.no_grad()
    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the weights, which add up to the number of active tasks before they are scaled."""
        active = is_active(losses, scale)
        ratio = torch.where(self.before > 0, self.last / self.before, 1.0)  # 0 until a task has had two epochs
        logits = torch.where(active, ratio / self.temperature, -torch.inf)
        # With no task at all the softmax is NaN; every coefficient is then 0.
        shares = torch.where(active, torch.softmax(logits, 0), 0.0)
        return scaled(shares * active.sum(), scale)

    @torch.no_grad()
    def end_epoch(self, losses: Tensor, scale: Tensor | None = None) -> None:
        """Take in the mean losses of an epoch; tasks that are not active keep what they had."""
        self.check(losses)
        active = is_active(losses, scale)
        self.before.copy_(torch.where(active, self.last, self.before))
        self.last.copy_(torch.where(active, losses, self.last))
