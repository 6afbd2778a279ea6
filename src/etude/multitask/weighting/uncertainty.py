"""Weights that are learned with the model: uncertainty (Kendall, Gal and Cipolla 2018) and IMTL-L (Liu et al. 2021)."""

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


@register("weighting", "imtl_l")
class ImpartialLosses(Weighting):
    """IMTL-L (Liu et al. 2021): eˢ·loss - s with a learned s for each task, which brings all losses to the same size.

    `log_scales` is a parameter: give it to the optimizer, without weight decay.

    >>> ImpartialLosses(["depth", "label"])(torch.tensor([4.0, 1.0])).item()
    5.0
    """

    has_penalty: ClassVar[bool] = True

    def __init__(self, tasks: Sequence[str], initial: Mapping[str, float] | None = None) -> None:
        """Give values of s to begin with, 0 for a task not named."""
        super().__init__(tasks)
        self.log_scales = nn.Parameter(self.vector(initial or {}, 0.0, "initial"))

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return eˢ, with gradient history."""
        return scaled(torch.exp(self.log_scales), scale)

    def penalties(self, scale: Tensor | None = None) -> Tensor:
        """Return -s of each task: what keeps it from shrinking without end."""
        return scaled(-self.log_scales, scale)
