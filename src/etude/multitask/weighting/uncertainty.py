"""Uncertainty weighting (Kendall, Gal and Cipolla 2018): the noise of every task is learned with the model."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from etude.config.registry import register
from etude.multitask.weighting.base import Weighting, scaled


@register("weighting", "uncertainty")
class UncertaintyWeighting(Weighting):
    """Learns s = log σ² of each task: e⁻ˢ·loss + s/2, or half of the first part for a task of regression.

    The half belongs to a squared error, which is the likelihood of Gaussian noise σ; `sigma` is then the noise that
    was found. `log_variances` is a parameter: give it to the optimizer, without weight decay.

    >>> weighting = UncertaintyWeighting(["depth", "label"], regression=["depth"])
    >>> weighting(torch.tensor([4.0, 1.0])).item()
    3.0
    """

    has_penalty: ClassVar[bool] = True
    halves: Tensor

    def __init__(
        self, tasks: Sequence[str], regression: Sequence[str] = (), initial: Mapping[str, float] | None = None
    ) -> None:
        """Name the tasks of regression; `initial` are values of log σ² to begin with, 0 for a task not named."""
        super().__init__(tasks)
        self.register_buffer("halves", self.vector(dict.fromkeys(regression, 0.5), 1.0, "regression"))
        self.log_variances = nn.Parameter(self.vector(initial or {}, 0.0, "initial"))

    @property
    def sigma(self) -> Tensor:
        """The noise of each task, as learned so far."""
        return torch.exp(self.log_variances.detach() / 2)

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return 1/σ², or 1/2σ² for regression, with gradient history."""
        return scaled(self.halves * torch.exp(-self.log_variances), scale)

    def penalties(self, scale: Tensor | None = None) -> Tensor:
        """Return log σ of each task: what keeps σ from growing without end."""
        return scaled(self.log_variances / 2, scale)
