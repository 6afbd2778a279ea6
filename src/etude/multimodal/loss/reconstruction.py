"""Base of expected-value losses: the values of a modality's tokens, and their distances from the target."""

import math
from abc import ABC, abstractmethod
from copy import copy
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from etude.core.errors import DataError

KindName = Literal["mse", "huber", "hl_gauss", "wasserstein"]
HUBER_DELTA = 1.0
"""Where the Huber loss becomes linear, in the units of the values."""
HL_SIGMA = 0.75
"""Width of the HL-Gauss Gaussian, in bins."""


class ChunkLoss(NamedTuple):
    """Losses of a chunk, one per row."""

    losses: Tensor
    squared_errors: Tensor
    """Mean over D of (E - c_t)², whatever the kind of loss."""


class Reconstruction(ABC):
    """The values of a modality's tokens, and a loss that compares distributions over them with the true token."""

    name: ClassVar[KindName]

    def __init__(self, values: Tensor) -> None:
        """`values` are (V,) numbers or (V, D) vectors; raise DataError for other shapes and non-finite values."""
        check_values(values)
        self.values = values.detach().to("cpu", torch.float64, copy=True).reshape(len(values), -1)
        # All kinds depend only on differences: without their common offset, values lose less precision in float32.
        self.centred = self.values - self.values.mean(0)
        self._moved: dict[tuple[torch.device, torch.dtype], Reconstruction] = {}
        self._source: Reconstruction | None = None

    @property
    def size(self) -> int:
        """The number of tokens, V."""
        return len(self.values)

    def on(self, device: torch.device, dtype: torch.dtype) -> "Reconstruction":
        """Return this with its tensors on a device and in a dtype, cached."""
        if self._source is not None:  # this one has full precision
            return self._source.on(device, dtype)
        found = self._moved.get((device, dtype))
        if found is None:
            found = copy(self)
            found._source = self
            with torch.inference_mode(False):  # a later step may need them for gradients
                for key, value in vars(self).items():
                    if isinstance(value, Tensor) and key != "values":
                        setattr(found, key, value.to(device, dtype))
            self._moved[device, dtype] = found
        return found

    @abstractmethod
    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (n,) of every row of logits (n, V) for the targets (n,), counted from 0 (plain formula)."""

    @abstractmethod
    def chunk_loss(self, logits: Tensor, probs: Tensor, targets: Tensor, row_weights: Tensor | None) -> ChunkLoss:
        """Return the losses of a chunk; with `row_weights` leave gradients of row_weight · loss in `logits`.

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

        Computed from products in float64: differences of all pairs would take D times the memory.
        """
        values = self.centred.double()
        squares = values.square().sum(1)
        chosen = values[targets]
        found = torch.addmm(squares, chosen, values.t(), alpha=-2.0).add_(squares[targets][:, None])
        # products leave a rounding error, which the square root would amplify
        found.scatter_(1, targets[:, None], 0.0)
        return found.clamp_min_(0.0).div_(values.shape[1]).to(self.centred.dtype)


def check_values(values: Tensor) -> None:
    """Raise DataError unless the values are (V,) or (V, D), floating-point and finite. Synchronises."""
    shape = tuple(values.shape)
    if values.dim() not in (1, 2) or 0 in shape or not values.is_floating_point():
        raise DataError(
            f"values of tokens must be floating-point numbers (V,) or vectors (V, D), found {values.dtype} {shape}"
        )
    if not bool(values.isfinite().all()):
        place = int((~values.isfinite()).reshape(shape[0], -1).any(1).nonzero()[0])
        raise DataError(f"the value of code {place} is not finite (NaN or infinite); fix the codebook")


def is_positive(number: Any) -> bool:
    """Whether this is a finite number above 0."""
    return isinstance(number, Real) and 0 < float(number) < math.inf


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ_i a_ni · b_ni without a matrix of products."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]
