"""PCGrad (Yu et al. 2020): of every two gradients in conflict, each loses what goes against the other."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from etude.config.registry import register
from etude.core.random import mix
from etude.multitask.weighting.base import Needs, Weighting, scaled


@register("weighting", "pcgrad")
class PCGrad(Weighting):
    """The sum of the tasks' gradients after each was projected, in random order, off those it conflicts with.

    The order is a function of the seed and the step, so there is no state to save. Parameters that only one task uses
    have no conflict: they take the gradient of the plain sum, which is what the coefficients give.

    >>> PCGrad(["a", "b"]).combine(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), step=0).tolist()
    [0.5, 1.5]
    """

    needs: ClassVar[Needs] = "gradients"

    def __init__(self, tasks: Sequence[str], seed: int = 0) -> None:
        super().__init__(tasks)
        self.seed = seed

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the scale: the losses are summed."""
        return scaled(torch.ones_like(losses), scale).detach()

    def order(self, step: int) -> Tensor:
        """Return, for every task, the order in which it is compared with the others: (tasks, tasks - 1)."""
        generator = torch.Generator().manual_seed(mix(self.seed, step))
        number = len(self.tasks)
        met = [torch.randperm(number - 1, generator=generator) for _ in range(number)]
        # Positions among the others become numbers of tasks by stepping over the task itself.
        return torch.stack([others + (others >= task) for task, others in enumerate(met)])

    @torch.no_grad()
    def combine(
        self, gradients: Tensor, *, step: int, scale: Tensor | None = None, active: Tensor | None = None
    ) -> Tensor:
        """Return the sum of the projected gradients.

        A projected gradient is a combination of the gradients, so the work is done on their products (tasks, tasks);
        the gradients themselves are read twice, whatever the number of tasks.
        """
        if scale is not None:
            gradients = torch.where(scale[:, None] > 0, gradients, 0.0) * scale[:, None]
        products = gradients @ gradients.T
        rows = torch.arange(len(self.tasks), device=gradients.device)
        shares = torch.eye(len(self.tasks), dtype=products.dtype, device=gradients.device)
        for other in self.order(step).to(gradients.device, non_blocking=True).T:
            conflict = (shares * products[other]).sum(1).clamp_max(0.0)  # with the gradient as projected so far
            length = products[other, other]
            shares[rows, other] -= torch.where(length > 0, conflict / length, 0.0)
        return shares.sum(0) @ gradients
