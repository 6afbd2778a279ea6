"""Weightings that use every step: FAMO the losses around an update, GradNorm and PCGrad gradients."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.random import mix
from etude.multitask.curriculum.phase import check_weight
from etude.multitask.weighting.base import Needs, Weighting, is_active, positive

_EPSILON = 1e-8
_LEAST = 1e-4
"""Lower bound of GradNorm's weights: a negative one would increase its loss."""


class VectorAdam(nn.Module):
    """Adam with torch's defaults for the vector of a weighting; `weight_decay` is added to the gradient."""

    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, size: int, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, (0.9, 0.999), 1e-8
        for name in ("mean", "square", "count"):
            self.register_buffer(name, torch.zeros(size))

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, active: Tensor) -> None:
        """Update the values in place for active tasks; other values and their state do not change."""
        gradient = gradient.to(values.dtype) + self.weight_decay * values  # losses may be float64
        first, second = self.betas
        count = self.count + active
        mean = torch.where(active, self.mean.lerp(gradient, 1 - first), self.mean)
        square = torch.where(active, self.square.lerp(gradient.square(), 1 - second), self.square)
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.square.copy_(square)
        corrected = mean / (1 - first**count)
        size = (square / (1 - second**count)).sqrt() + self.eps
        values.copy_(torch.where(active, values - self.lr * corrected / size, values))


@register("weighting", "famo")
class FAMO(Weighting):
    """FAMO (Liu, Feng, Stone and Liu 2023): all losses fall at the same rate, without the tasks' gradients.

    It follows Σ z·∇log(loss), z = softmax(logits); the logits learn from how much each log loss fell in an update.

    `floor` has lower bounds of the losses, 0 for a task without one: a loss must stay above its floor. `lr` and
    `decay` apply to the logits. With `decay` old information fades, as the objective changes during training.
    """

    needs: ClassVar[Needs] = "updates"
    logits: Tensor
    floors: Tensor
    used: Tensor
    """The coefficients of every task in the last step in which it was active, for logs."""

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
        self.adam = VectorAdam(len(self.tasks), positive(lr, "lr"), check_weight(decay, "decay"))

    @torch.no_grad()
    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return z / (c·height): the height is the loss above its floor, and c makes the weights sum to 1."""
        active = is_active(losses, scale)
        shares = torch.where(active, self.shares(active) / self._height(losses), 0.0)
        total = shares.sum()
        return shares / torch.where(total > 0, total, 1.0)

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


@register("weighting", "gradnorm")
class GradNorm(Weighting):
    """GradNorm (Chen et al. 2018): weights that bring the tasks' gradient norms to a common scale.

    Weights follow gradient descent on Σ |w·‖g‖ − mean(w·‖g‖)·rᵅ|, and sum to the number of tasks.

    g is a task's gradient with respect to the shared `layer` (such as `trunk.fc`; by default the last one in the
    forward pass), and r its loss relative to the initial one, divided by the mean of these ratios. A larger `alpha`
    favours slow tasks more. `initial` has initial losses, such as log(classes); the default is the first observed
    loss.
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
        self.alpha = check_weight(alpha, "alpha")
        for task, loss in (initial or {}).items():
            positive(loss, f"the initial loss of task '{task}'")
        self.register_buffer("weights", torch.ones(len(self.tasks)))
        self.register_buffer("first", self.vector(initial or {}, 0.0, "initial"))
        self.adam = VectorAdam(len(self.tasks), positive(lr, "lr"))

    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return the weights."""
        return self.weights

    @torch.no_grad()
    def observe(self, losses: Tensor, gradients: Tensor, scale: Tensor | None = None) -> None:
        """Adjust the weights from the losses and the tasks' gradients; they take effect in the next step."""
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
        # Active tasks keep their total weight: a step without one of the tasks does not reset weights.
        self.weights.copy_(torch.where(active, kept * together / kept.sum().clamp_min(_LEAST), self.weights))


@register("weighting", "pcgrad")
class PCGrad(Weighting):
    """PCGrad (Yu et al. 2020): for every two conflicting gradients, each loses its component against the other.

    Sums the tasks' gradients after each was projected, in random order, onto the normal plane of those it conflicts
    with.

    The order is a function of the seed and the step, so there is no state to save. Parameters that only one task uses
    have no conflict: they get the gradient of the weighted sum.

    >>> PCGrad(["a", "b"]).combine(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]), step=0).tolist()
    [0.5, 1.5]
    """

    needs: ClassVar[Needs] = "gradients"

    def __init__(self, tasks: Sequence[str], seed: int = 0) -> None:
        super().__init__(tasks)
        self.seed = seed

    def order(self, step: int) -> Tensor:
        """Return for every task the order in which it is compared with the others: (tasks, tasks - 1)."""
        generator = torch.Generator().manual_seed(mix(self.seed, step))
        number = len(self.tasks)
        met = [torch.randperm(number - 1, generator=generator) for _ in range(number)]
        # Indices among the others become task indices by skipping the task itself.
        return torch.stack([others + (others >= task) for task, others in enumerate(met)])

    @torch.no_grad()
    def merge(self, gradients: Tensor, step: int, active: Tensor) -> Tensor:
        """Return the sum of the projected gradients.

        A projected gradient is a linear combination of the gradients, so the work is done on their inner products
        (tasks, tasks); the gradients themselves are read only twice for any number of tasks.
        """
        products = gradients @ gradients.T
        rows = torch.arange(len(self.tasks), device=gradients.device)
        shares = torch.eye(len(self.tasks), dtype=products.dtype, device=gradients.device)
        for other in self.order(step).to(gradients.device, non_blocking=True).T:
            conflict = (shares * products[other]).sum(1).clamp_max(0.0)  # with the gradient projected so far
            length = products[other, other]
            shares[rows, other] -= torch.where(length > 0, conflict / length, 0.0)
        return shares.sum(0) @ gradients
