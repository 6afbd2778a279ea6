"""GradNorm (Chen et al. 2018): weights that bring the tasks' gradient norms to a common scale."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from etude.config.registry import register
from etude.multitask.weighting.base import Needs, VectorAdam, Weighting, is_active, not_negative, positive, scaled

_LEAST = 1e-4
"""Weights stay above this: a negative one would drive its loss up."""


@register("weighting", "gradnorm")
class GradNorm(Weighting):
    """Weights move down the gradient of Σ |w·‖g‖ − mean(w·‖g‖)·rᵅ|, and add up to the number of tasks.

    g is a task's gradient of the shared `layer` (such as `trunk.fc`; by default the one that the forward pass uses
    last), r its loss relative to where it began, over the mean of the same. A larger `alpha` pulls harder at tasks that
    lag. `initial` are the losses to count from, log(classes) say; for a task not named, the first loss that is seen.
    """

    needs: ClassVar[Needs] = "layer_gradients"
    weights: Tensor
    first: Tensor

    def __init__(
        self,
        tasks: Sequence[str],
        alpha: float = 1.5,
        lr: float = 0.025,
        initial: Mapping[str, float] | None = None,
        layer: str | None = None,
    ) -> None:
        super().__init__(tasks)
        self.layer = layer
        self.alpha = not_negative(alpha, "alpha")
        for task, loss in (initial or {}).items():
            positive(loss, f"the initial loss of task '{task}'")
        self.register_buffer("weights", torch.ones(len(self.tasks)))
        self.register_buffer("first", self.vector(initial or {}, 0.0, "initial"))
        self.adam = VectorAdam(len(self.tasks), positive(lr, "lr"))

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the weights."""
        return scaled(self.weights, scale)

    @torch.no_grad()
    def observe(self, losses: Tensor, gradients: Tensor, scale: Tensor | None = None) -> None:
        """Adjust the weights from the losses and the tasks' gradients; they take effect from the next step on."""
        self.check(losses)
        active = is_active(losses, scale)
        number = active.sum().clamp_min(1)
        seen = torch.where(active, losses.detach(), 0.0)
        self.first.copy_(torch.where(active & (self.first <= 0), seen, self.first))
        progress = torch.where(self.first > 0, seen / self.first, 0.0)
        mean = progress.sum() / number
        rate = torch.where(mean > 0, progress / mean, 1.0)
        norms = torch.where(active, torch.linalg.vector_norm(gradients, dim=1).to(losses.dtype), 0.0)
        weighed = self.weights * norms
        target = weighed.sum() / number * rate**self.alpha
        together = torch.where(active, self.weights, 0.0).sum()
        self.adam.step(self.weights, torch.sign(weighed - target) * norms, active)
        kept = torch.where(active, self.weights.clamp_min(_LEAST), 0.0)
        # The active ones share what they had together: a step without one of the tasks does not unlearn weights.
        self.weights.copy_(torch.where(active, kept * together / kept.sum().clamp_min(_LEAST), self.weights))
