"""Weights that need nothing from a step: fixed ones, learned ones, and those that follow the losses of epochs."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from etude.config.registry import register
from etude.multitask.curriculum.phase import check_weight
from etude.multitask.weighting.base import Weighting, is_active, positive


@register("weighting", "static")
class StaticWeights(Weighting):
    """Σ weight·loss, with fixed weights; 1 for a task without one.

    >>> StaticWeights(["code", "tests"], {"tests": 0.5})(torch.tensor([1.0, 4.0])).item()
    3.0
    """

    weights: Tensor

    def __init__(self, tasks: Sequence[str], weights: Mapping[str, float] | None = None) -> None:
        super().__init__(tasks)
        for task, weight in (weights or {}).items():
            check_weight(weight, f"the weight of task '{task}'")
        self.register_buffer("weights", self.vector(weights or {}, 1.0, "weights"))

    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return the weights."""
        return self.weights


@register("weighting", "uncertainty")
class UncertaintyWeighting(Weighting):
    """Uncertainty weighting (Kendall, Gal and Cipolla 2018).

    Learns s = log σ² of each task: e⁻ˢ·loss + s/2, with half of the first term for a regression task.

    The half belongs to a squared error, the negative log-likelihood of Gaussian noise σ; `sigma` is then the learned
    noise. `log_variances` is a parameter: add it to the optimizer, without weight decay.

    >>> weighting = UncertaintyWeighting(["depth", "label"], regression=["depth"])
    >>> weighting(torch.tensor([4.0, 1.0])).item()
    3.0
    """

    has_penalty: ClassVar[bool] = True
    halves: Tensor

    def __init__(
        self, tasks: Sequence[str], regression: Sequence[str] = (), initial: Mapping[str, float] | None = None
    ) -> None:
        """Name the regression tasks; `initial` has initial values of log σ², 0 for a task without one."""
        super().__init__(tasks)
        self.register_buffer("halves", self.vector(dict.fromkeys(regression, 0.5), 1.0, "regression"))
        self.log_variances = nn.Parameter(self.vector(initial or {}, 0.0, "initial"))

    @property
    def sigma(self) -> Tensor:
        """The noise of each task, as learned so far."""
        return torch.exp(self.log_variances.detach() / 2)

    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return 1/σ², or 1/2σ² for regression, differentiably."""
        return self.halves * torch.exp(-self.log_variances)

    def penalties_of(self) -> Tensor:
        """Return log σ of each task, which keeps σ from growing without bound."""
        return self.log_variances / 2


@register("weighting", "imtl_l")
class ImpartialLosses(Weighting):
    """IMTL-L (Liu et al. 2021): eˢ·loss - s with a learned s per task, which brings all losses to the same size.

    `log_scales` is a parameter: add it to the optimizer, without weight decay.

    >>> ImpartialLosses(["depth", "label"])(torch.tensor([4.0, 1.0])).item()
    5.0
    """

    has_penalty: ClassVar[bool] = True

    def __init__(self, tasks: Sequence[str], initial: Mapping[str, float] | None = None) -> None:
        """Set the initial values of s, 0 for a task without one."""
        super().__init__(tasks)
        self.log_scales = nn.Parameter(self.vector(initial or {}, 0.0, "initial"))

    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return eˢ, differentiably."""
        return torch.exp(self.log_scales)

    def penalties_of(self) -> Tensor:
        """Return -s of each task, which keeps the scale from shrinking without bound."""
        return -self.log_scales


@register("weighting", "dwa")
class DynamicWeightAverage(Weighting):
    """Dynamic weight average (Liu, Johns and Davison 2019): tasks whose loss falls more slowly count more.

    K·softmax(r / temperature) over the K active tasks, where r is the last epoch's loss over that of the one before.

    A task with fewer than two finished epochs has r = 1.

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
    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return the weights, which sum to the number of active tasks."""
        active = is_active(losses, scale)
        ratio = torch.where(self.before > 0, self.last / self.before, 1.0)  # 0 until a task has had two epochs
        logits = torch.where(active, ratio / self.temperature, -torch.inf)
        # Without any task the softmax is NaN; every coefficient is then 0.
        shares = torch.where(active, torch.softmax(logits, 0), 0.0)
        return shares * active.sum()

    @torch.no_grad()
    def end_epoch(self, losses: Tensor, scale: Tensor | None = None) -> None:
        """Process the mean losses of an epoch; inactive tasks keep their values."""
        self.check(losses)
        active = is_active(losses, scale)
        self.before.copy_(torch.where(active, self.last, self.before))
        self.last.copy_(torch.where(active, losses, self.last))
