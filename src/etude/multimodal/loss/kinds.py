"""Comparing a distribution over the values of a modality with the true value: the kinds of loss, by name.

Below, p is the distribution, c_i the value of token i, c_t that of the true token t, D the size of a value and
E = Σ p_i c_i the expected value.

    mse          mean over D of (E - c_t)²
    huber        mean over D of (E - c_t)²/2 where |E - c_t| ≤ delta, else of delta · (|E - c_t| - delta/2)
    wasserstein  Σ p_i · |c_i - c_t|: the distance the mass must move; for vectors the root mean square over D
    hl_gauss     cross entropy of p with a Gaussian around c_t, spread over the bins

The first two depend only on the mean of the distribution: mass on both sides of the true value, and none near it, can
have zero loss. The last two are minimal only if the mass is at the true value.

Each kind has the plain formula, `row_losses`, which autograd differentiates, and `chunk_loss`, which works in place.
"""

from abc import abstractmethod
from typing import get_args

import torch
from torch import Tensor

from etude.core.errors import ConfigError
from etude.core.spelling import suggest
from etude.multimodal.loss.hl_gauss import HLGauss
from etude.multimodal.loss.reconstruction import (
    HL_SIGMA,
    HUBER_DELTA,
    ChunkLoss,
    KindName,
    Reconstruction,
    is_positive,
    row_products,
)


class _OfExpectation(Reconstruction):
    """A penalty on the difference between the expected value and the true one."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        self.with_ones = torch.cat([self.centred, torch.ones_like(self.centred[:, :1])], 1).t().contiguous()

    @abstractmethod
    def penalty(self, errors: Tensor) -> Tensor:
        """Return the penalty (n,) of errors (n, D)."""

    @abstractmethod
    def slopes(self, errors: Tensor) -> Tensor:
        """Return the gradient (n, D) of the penalty."""

    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the penalty of softmax(logits) @ values - values[targets]."""
        values = self.centred.to(logits)
        return self.penalty(torch.softmax(logits, -1) @ values - values[targets])

    def chunk_loss(self, logits: Tensor, probs: Tensor, targets: Tensor, row_weights: Tensor | None) -> ChunkLoss:
        """With s the gradient of the penalty, that of logit i is p_i · (s·c_i - s·E)."""
        errors = self.errors(probs, targets)
        if row_weights is not None:
            slopes = self.slopes(errors).mul_(row_weights[:, None])
            shift = slopes.mul(errors + self.centred[targets]).sum(1, keepdim=True)
            torch.mm(torch.cat([slopes, shift.neg_()], 1), self.with_ones, out=logits)
            logits.mul_(probs)
        return ChunkLoss(self.penalty(errors), errors.square().mean(1))


class MeanSquaredError(_OfExpectation):
    """Mean squared difference of the expected value and the true one."""

    name = "mse"

    def penalty(self, errors: Tensor) -> Tensor:
        """Return the mean of the squares."""
        return errors.square().mean(1)

    def slopes(self, errors: Tensor) -> Tensor:
        """Return 2 · errors / D."""
        return errors * (2.0 / errors.shape[1])


class Huber(_OfExpectation):
    """Huber loss of the expected value: quadratic up to `delta`, linear beyond, so that outliers count less."""

    name = "huber"

    def __init__(self, values: Tensor, delta: float = HUBER_DELTA) -> None:
        super().__init__(values)
        if not is_positive(delta):
            raise ConfigError(f"huber_delta is {delta!r}; it must be a number above 0, in the units of the values")
        self.delta = delta

    def penalty(self, errors: Tensor) -> Tensor:
        """Return the mean of the Huber losses."""
        size = errors.abs()
        inner = size.clamp_max(self.delta)
        return (inner * (size - inner / 2)).mean(1)

    def slopes(self, errors: Tensor) -> Tensor:
        """Return the errors, clamped to ± delta, / D."""
        return errors.clamp(-self.delta, self.delta).div_(errors.shape[1])


class Wasserstein(Reconstruction):
    """The Wasserstein-1 distance of the distribution from the true value: the number-token loss NTL-WAS."""

    name = "wasserstein"

    def distances(self, targets: Tensor) -> Tensor:
        """Return the distance (n, V) of every value from those of the targets."""
        if self.centred.shape[1] == 1:
            row = self.centred[:, 0]
            return (row - row[targets][:, None]).abs_()
        return self.squared_distances(targets).sqrt_()

    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the expected distance from the true value."""
        return (torch.softmax(logits, -1) * self.distances(targets).to(logits)).sum(1)

    def chunk_loss(self, logits: Tensor, probs: Tensor, targets: Tensor, row_weights: Tensor | None) -> ChunkLoss:
        """The gradient of logit i is p_i · (distance of c_i - loss)."""
        distances = self.distances(targets)
        losses = row_products(probs, distances)
        if row_weights is not None:
            torch.sub(distances, losses[:, None], out=logits).mul_(probs).mul_(row_weights[:, None])
        return ChunkLoss(losses, self.errors(probs, targets).square_().mean(1))


def make_reconstruction(
    kind: str,
    values: Tensor,
    *,
    edges: Tensor | None = None,
    huber_delta: float = HUBER_DELTA,
    hl_sigma: float = HL_SIGMA,
) -> Reconstruction:
    """Return the loss of that name for these values; raise ConfigError for an unknown name.

    >>> loss = make_reconstruction("wasserstein", torch.tensor([0.0, 1.0, 5.0]))
    >>> logits = torch.tensor([[0.0, 0.0, -1e9]])
    >>> loss.row_losses(logits, torch.tensor([0])), loss.expected(logits)
    (tensor([0.5000]), tensor([[0.5000]]))
    """
    if kind == "mse":
        return MeanSquaredError(values)
    if kind == "huber":
        return Huber(values, huber_delta)
    if kind == "wasserstein":
        return Wasserstein(values)
    if kind == "hl_gauss":
        return HLGauss(values, hl_sigma, edges)
    raise ConfigError(f"unknown kind of loss {kind!r}{suggest(str(kind), get_args(KindName))}")
