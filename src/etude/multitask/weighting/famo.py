"""FAMO (Liu, Feng, Stone and Liu 2023): all losses fall at the same rate, without the tasks' gradients."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from etude.config.registry import register
from etude.multitask.weighting.base import Needs, VectorAdam, Weighting, is_active, not_negative, positive, scaled

_EPSILON = 1e-8


@register("weighting", "famo")
class FAMO(Weighting):
    """Follows Σ z·∇log(loss), z = softmax(logits); the logits learn from how much each log loss fell in an update.

    `floor` are the least values the losses can have, 0 for a task not named: a loss must stay above its floor. `lr` and
    `decay` belong to the logits. With `decay` the weights forget, as the objective changes while a model learns.
    """

    needs: ClassVar[Needs] = "updates"
    logits: Tensor
    floors: Tensor
    used: Tensor
    """The coefficients of every task in the last step it was active in, for people."""

    def __init__(
        self,
        tasks: Sequence[str],
        lr: float = 0.025,
        decay: float = 0.01,
        floor: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(tasks)
        self.register_buffer("logits", torch.zeros(len(self.tasks)))
        self.register_buffer("used", torch.zeros(len(self.tasks)))
        self.register_buffer("floors", self.vector(floor or {}, 0.0, "floor"))
        self.adam = VectorAdam(len(self.tasks), positive(lr, "lr"), not_negative(decay, "decay"))

    @torch.no_grad()
    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return z / (c·height): the height is the loss over its floor, and c makes the coefficients add up to 1."""
        active = is_active(losses, scale)
        shares = torch.where(active, self.shares(active) / self._height(losses), 0.0)
        total = shares.sum()
        return scaled(shares / torch.where(total > 0, total, 1.0), scale)

    @torch.no_grad()
    def after_update(self, before: Tensor, after: Tensor, scale: Tensor | None = None) -> None:
        """Move the logits towards the tasks whose log loss fell least."""
        self.check(after)
        active = is_active(before, scale)
        self.used.copy_(torch.where(active, self.coefficients(before, scale), self.used))
        fell = self._height(before).log() - self._height(after).log()
        fell = torch.where(active, fell, 0.0)
        shares = self.shares(active)
        self.adam.step(self.logits, shares * (fell - (shares * fell).sum()), active)

    def latest(self, scale: Tensor) -> Tensor:
        """Return the coefficients of the last step."""
        return self.used

    def shares(self, active: Tensor) -> Tensor:
        """Return z, the softmax of the logits over the active tasks."""
        shares = torch.softmax(torch.where(active, self.logits, -torch.inf), 0)
        return torch.where(active, shares, 0.0)

    def _height(self, losses: Tensor) -> Tensor:
        return (losses.detach() - self.floors).clamp_min(0.0) + _EPSILON
