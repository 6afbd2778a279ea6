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

import math
from abc import abstractmethod
from typing import get_args

import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError
from etude.core.spelling import suggest
from etude.multimodal.loss.reconstruction import (
    HL_SIGMA,
    HUBER_DELTA,
    ChunkLoss,
    KindName,
    Reconstruction,
    is_positive,
    row_products,
)

EQUAL = 1e-12
"""Squared distances up to this share of the vectors' squared norms are rounding errors, and are set to 0."""
NEIGHBOUR_ROWS = 256
"""Rows of distances in memory at a time in the search for nearest neighbours."""


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


class HLGauss(Reconstruction):
    """Cross entropy with a Gaussian around the true value, discretised into bins: the histogram loss HL-Gauss.

    `sigma` is the width of the Gaussian in units of the true value's own bin, so that it reaches as many neighbours
    in wide bins as in narrow ones. Without `edges` they are halfway between the centres. Vectors have no bins: there
    the weight of a value falls with its distance from the true one, in units of the distance to the nearest
    neighbour.
    """

    name = "hl_gauss"

    def __init__(self, values: Tensor, sigma: float = HL_SIGMA, edges: Tensor | None = None) -> None:
        """Raise DataError if bins are not increasing or if the edges do not belong to them."""
        super().__init__(values)
        if not is_positive(sigma):
            raise ConfigError(f"hl_sigma is {sigma!r}; it must be a number above 0, in widths of a bin")
        if self.values.shape[1] == 1:
            found = bin_edges(self.values[:, 0]) if edges is None else edges.detach().double().cpu()
            _check_edges(found, self.values[:, 0].cpu())
            found = found.to(self.values.device)
            self.edges, self.edge_rests = _split(found - self.values.mean(0))
            self.places, self.place_rests = _split(self.centred)
            self.sigmas = sigma * found.diff()
        else:
            self.sigmas = sigma * self._neighbours()

    def soft_targets(self, targets: Tensor) -> Tensor:
        """Return the target distribution (n, V) of each target."""
        sigmas = self.sigmas[targets][:, None]
        if self.centred.shape[1] > 1:
            return torch.softmax(self.squared_distances(targets).div_(-2.0 * sigmas.square()), 1)
        distances = (self.edges - self.places[targets]).add_(self.edge_rests).sub_(self.place_rests[targets])
        cumulated = torch.erf(distances.div_(sigmas * math.sqrt(2.0)))
        total = cumulated[:, -1:] - cumulated[:, :1]
        return cumulated.diff(dim=1).div_(total)

    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return -Σ q_i · log p_i, with q the soft target."""
        return -(self.soft_targets(targets).to(logits) * torch.log_softmax(logits, -1)).sum(1)

    def chunk_loss(self, logits: Tensor, probs: Tensor, targets: Tensor, row_weights: Tensor | None) -> ChunkLoss:
        """The gradient of logit i is p_i - q_i."""
        wanted = self.soft_targets(targets)
        largest, place = logits.max(1, keepdim=True)
        # The largest probability is at least 1/V, so its logarithm is exact.
        log_total = largest - probs.gather(1, place).log_()
        losses = log_total[:, 0] - row_products(wanted, logits)
        squared = self.errors(probs, targets).square_().mean(1)
        if row_weights is not None:
            torch.sub(probs, wanted, out=logits).mul_(row_weights[:, None])
        return ChunkLoss(losses, squared)

    def _neighbours(self) -> Tensor:
        """Return the distance of every value from the nearest other one; for equal values, the smallest distance."""
        rows = torch.arange(self.size, device=self.values.device)
        squares = self.centred.square().mean(1)
        nearest = []
        for part in torch.split(rows, NEIGHBOUR_ROWS):
            squared = self.squared_distances(part)
            squared[squared <= EQUAL * (squares[part][:, None] + squares)] = math.inf
            nearest.append(squared.amin(1).sqrt_())
        found = torch.cat(nearest)
        least = found.amin()
        return torch.where(found.isfinite(), found, torch.where(least.isfinite(), least, 1.0))


def bin_edges(centres: Tensor) -> Tensor:
    """Return edges halfway between centres; the outermost are symmetric to the next ones.

    >>> bin_edges(torch.tensor([0.0, 1.0, 3.0]))
    tensor([-0.5000,  0.5000,  2.0000,  4.0000])
    """
    if len(centres) == 1:
        return torch.stack([centres[0] - 0.5, centres[0] + 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return torch.cat([2 * centres[:1] - middles[:1], middles, 2 * centres[-1:] - middles[-1:]])


def _check_edges(edges: Tensor, centres: Tensor) -> None:
    if edges.shape != (len(centres) + 1,):
        raise DataError(f"{len(centres)} bins need {len(centres) + 1} edges, found {tuple(edges.shape)}")
    if not bool(edges.isfinite().all() and (edges.diff() > 0).all()):
        raise DataError(
            "hl_gauss needs finite bins in increasing order; sort the tokenizer's bins, or choose wasserstein, "
            "which needs no order"
        )
    rounding = torch.finfo(torch.float32).eps * edges.abs().amax()
    outside = (centres < edges[:-1] - rounding) | (centres > edges[1:] + rounding)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        low, high = edges[place : place + 2].tolist()
        raise DataError(f"the value {float(centres[place]):g} lies outside its bin, {low:g} … {high:g}")


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values into a float32 part and a remainder, both in float64.

    The sum of the differences of both is exact to float32 even if bins are narrower than its precision.
    """
    held = values.float().double()
    return held, values - held


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
