"""Static weights: a number for each task."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from etude.config.registry import register
from etude.multitask.weighting.base import Weighting, not_negative, scaled


@register("weighting", "static")
class StaticWeights(Weighting):
    """Σ weight·loss, with fixed weights; 1 for a task that is not named.

    >>> import torch
    >>> StaticWeights(["code", "tests"], {"tests": 0.5})(torch.tensor([1.0, 4.0])).item()
    3.0
    """

    weights: Tensor

    def __init__(self, tasks: Sequence[str], weights: Mapping[str, float] | None = None) -> None:
        super().__init__(tasks)
        for task, weight in (weights or {}).items():
            not_negative(weight, f"the weight of task '{task}'")
        self.register_buffer("weights", self.vector(weights or {}, 1.0, "weights"))

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the weights."""
        return scaled(self.weights, scale)
