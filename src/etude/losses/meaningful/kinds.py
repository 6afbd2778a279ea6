"""How a distribution over the values of a modality is compared with the true value: the kinds of loss, by name.

Below, p is the distribution, c_i the value of token i, c_t that of the true token t, D the size of a value and
E = Σ p_i c_i the expected value.

    mse          mean over D of (E - c_t)²
    huber        mean over D of (E - c_t)²/2 where |E - c_t| ≤ delta, else of delta · (|E - c_t| - delta/2)
    wasserstein  Σ p_i · |c_i - c_t|: how far the mass has to move; for vectors the root mean square over D
    hl_gauss     cross entropy of p with a Gaussian around c_t, spread over the bins

The first two see the distribution through its mean alone: mass on both sides of the truth, and none near it, is as good
as the truth to them. The last two are least only where the mass lies at the truth.

Each kind has the plain formula, `row_losses`, which torch differentiates, and `settle`, which works in place.
"""

import math
from abc import ABC, abstractmethod
from copy import copy
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from etude.config.spelling import did_you_mean, listed
from etude.core.errors import ConfigError, DataError

KindName = Literal["mse", "huber", "hl_gauss", "wasserstein"]
EQUAL = 1e-12
"""Squared distances up to this share of the vectors' own squares are rounding errors of products, and stand for 0."""
NEIGHBOUR_ROWS = 256
"""Rows of distances that are held at a time when nearest neighbours are looked for."""


class Settled(NamedTuple):
    """What a chunk comes to, one number for each row."""

    losses: Tensor
    squared_errors: Tensor
    """Mean over D of (E - c_t)², whatever the kind of loss."""


class Reconstruction(ABC):
    """The values of a modality's tokens, and a loss that compares distributions over them with the true token."""

    name: ClassVar[KindName]

    def __init__(self, values: Tensor) -> None:
        """`values` are (V,) numbers or (V, D) vectors; raise DataError for other shapes and values not finite."""
        check_values(values)
        self.values = values.detach().to(torch.float64).reshape(len(values), -1)
        # All kinds depend on differences only: without their common part, values lose fewer digits in float32.
        self.centred = self.values - self.values.mean(0)
        self._moved: dict[tuple[torch.device, torch.dtype], Reconstruction] = {}

    @property
    def size(self) -> int:
        """The number of tokens, V."""
        return len(self.values)

    def on(self, device: torch.device, dtype: torch.dtype) -> "Reconstruction":
        """Return this with its tensors on a device and of a type; made once for each."""
        found = self._moved.get((device, dtype))
        if found is None:
            found = copy(self)
            for key, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(found, key, value.to(device, dtype))
            self._moved[device, dtype] = found
        return found

    @abstractmethod
    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (n,) of every row of logits (n, V) for the true tokens (n,), counted from 0: the formula."""

    @abstractmethod
    def settle(self, logits: Tensor, probs: Tensor, targets: Tensor, *, gradients: bool) -> Settled:
        """Return the losses of a chunk; with `gradients` leave those of its logits in `logits`.

        `probs` are the softmax of the logits. Both may be overwritten.
        """

    def expected(self, logits: Tensor) -> Tensor:
        """Return the expected values (n, D) of rows of logits."""
        return torch.softmax(logits, -1) @ self.values.to(logits)

    def errors(self, probs: Tensor, targets: Tensor) -> Tensor:
        """Return E - c_t, (n, D)."""
        return torch.mm(probs, self.centred).sub_(self.centred[targets])

    def squared_distances(self, targets: Tensor) -> Tensor:
        """Return the mean over D of (c_i - c_t)², (n, V), of every value from those of the targets.

        By products, in float64: differences of all pairs would take D times the memory.
        """
        values = self.centred.double()
        squares = values.square().sum(1)
        chosen = values[targets]
        found = torch.addmm(squares, chosen, values.t(), alpha=-2.0).add_(squares[targets][:, None])
        found.scatter_(1, targets[:, None], 0.0)  # products leave a rounding error, which its root would make large
        return found.clamp_min_(0.0).div_(values.shape[1]).to(self.centred.dtype)


class _OfExpectation(Reconstruction):
    """A penalty of the difference between the expected value and the true one."""

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

    def settle(self, logits: Tensor, probs: Tensor, targets: Tensor, *, gradients: bool) -> Settled:
        """With s the gradient of the penalty, that of logit i is p_i · (s·c_i - s·E)."""
        errors = self.errors(probs, targets)
        if gradients:
            slopes = self.slopes(errors)
            shift = slopes.mul(errors + self.centred[targets]).sum(1, keepdim=True)
            torch.mm(torch.cat([slopes, shift.neg_()], 1), self.with_ones, out=logits)
            logits.mul_(probs)
        return Settled(self.penalty(errors), errors.square().mean(1))


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
    """Huber's loss of the expected value: quadratic up to `delta`, linear beyond, so that far values weigh less."""

    name = "huber"

    def __init__(self, values: Tensor, delta: float = 1.0) -> None:
        super().__init__(values)
        if not _is_positive(delta):
            raise ConfigError(f"huber_delta is {delta!r}; it must be a number above 0, in the units of the values")
        self.delta = delta

    def penalty(self, errors: Tensor) -> Tensor:
        """Return the mean of Huber's losses."""
        size = errors.abs()
        inner = size.clamp_max(self.delta)
        return (inner * (size - inner / 2)).mean(1)

    def slopes(self, errors: Tensor) -> Tensor:
        """Return the errors, cut off at ± delta, / D."""
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

    def settle(self, logits: Tensor, probs: Tensor, targets: Tensor, *, gradients: bool) -> Settled:
        """The gradient of logit i is p_i · (distance of c_i - loss)."""
        distances = self.distances(targets)
        losses = _row_products(probs, distances)
        if gradients:
            torch.sub(distances, losses[:, None], out=logits).mul_(probs)
        return Settled(losses, self.errors(probs, targets).square_().mean(1))


class HLGauss(Reconstruction):
    """Cross entropy with a Gaussian around the true value, cut into the bins: the histogram loss HL-Gauss.

    `sigma` is the width of the Gaussian in units of the true value's own bin, so that it reaches as many neighbours in
    wide bins as in narrow ones. Without `edges` of the bins they lie halfway between the centres. Vectors have no bins:
    there the weight of a value falls with its distance from the true one, in units of the nearest neighbour's.
    """

    name = "hl_gauss"

    def __init__(self, values: Tensor, sigma: float = 0.75, edges: Tensor | None = None) -> None:
        """Raise DataError if bins are not in increasing order or if the edges do not belong to them."""
        super().__init__(values)
        if not _is_positive(sigma):
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
        """Return the distribution (n, V) that each target stands for."""
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

    def settle(self, logits: Tensor, probs: Tensor, targets: Tensor, *, gradients: bool) -> Settled:
        """The gradient of logit i is p_i - q_i."""
        wanted = self.soft_targets(targets)
        largest, place = logits.max(1, keepdim=True)
        # The largest probability is at least 1/V, so its logarithm is exact.
        log_total = largest - probs.gather(1, place).log_()
        losses = log_total[:, 0] - _row_products(wanted, logits)
        squared = self.errors(probs, targets).square_().mean(1)
        if gradients:
            torch.sub(probs, wanted, out=logits)
        return Settled(losses, squared)

    def _neighbours(self) -> Tensor:
        """Return the distance of every value from the nearest other one; of equal ones, the least there is."""
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


def make_reconstruction(
    kind: str,
    values: Tensor,
    *,
    edges: Tensor | None = None,
    huber_delta: float = 1.0,
    hl_sigma: float = 0.75,
) -> Reconstruction:
    """Return the loss of that name for these values; raise ConfigError if there is none of that name.

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
    names = get_args(KindName)
    raise ConfigError(f"there is no kind of loss {kind!r}{did_you_mean(kind, names)} (there are: {listed(names)})")


def check_values(values: Tensor) -> None:
    """Raise DataError unless the values are (V,) or (V, D), floating and finite. Waits for the device."""
    shape = tuple(values.shape)
    if values.dim() not in (1, 2) or 0 in shape or not values.is_floating_point():
        raise DataError(f"values of tokens are floating numbers (V,) or vectors (V, D), found {values.dtype} {shape}")
    if not bool(values.isfinite().all()):
        place = int((~values.isfinite()).reshape(shape[0], -1).any(1).nonzero()[0])
        raise DataError(f"the value of code {place} is not finite (NaN or infinite); mend the codebook")


def bin_edges(centres: Tensor) -> Tensor:
    """Return edges halfway between centres, the outermost as far out as the next ones lie in.

    >>> bin_edges(torch.tensor([0.0, 1.0, 3.0]))
    tensor([-0.5000,  0.5000,  2.0000,  4.0000])
    """
    if len(centres) == 1:
        return torch.stack([centres[0] - 0.5, centres[0] + 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return torch.cat([2 * centres[:1] - middles[:1], middles, 2 * centres[-1:] - middles[-1:]])


def _check_edges(edges: Tensor, centres: Tensor) -> None:
    if edges.shape != (len(centres) + 1,):
        raise DataError(f"{len(centres)} bins have {len(centres) + 1} edges, found {tuple(edges.shape)}")
    if not bool(edges.isfinite().all()):
        raise DataError("edges of bins must be finite numbers; let the outer bins end where the values do")
    if not bool((edges.diff() > 0).all()):
        raise DataError(
            "hl_gauss needs bins in increasing order, and these are not; sort the tokenizer's bins, "
            "or choose wasserstein, which needs no order"
        )
    rounding = torch.finfo(torch.float32).eps * edges.abs().amax()
    outside = (centres < edges[:-1] - rounding) | (centres > edges[1:] + rounding)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        low, high = edges[place : place + 2].tolist()
        raise DataError(f"the value {float(centres[place]):g} lies outside its bin, {low:g} … {high:g}")


def _is_positive(number: Any) -> bool:
    return isinstance(number, Real) and 0 < float(number) < math.inf


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as float32 can hold them and what is left, both in float64.

    Differences of the one plus those of the other are exact to float32 even where bins are narrower than its digits.
    """
    held = values.float().double()
    return held, values - held


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ_i a_ni · b_ni without a matrix of products."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]
