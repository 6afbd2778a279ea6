"""Metrics of numbers: MAE, MSE, RMSE, R² and Spearman's correlation.

Labels that are NaN do not count. A NaN prediction makes the result nan.
"""

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.config.registry import register
from etude.core.errors import DataError
from etude.metrics.base import Kept, Metric
from etude.metrics.inputs import counted_labels, form_of

Array = npt.NDArray[np.float64]


class _MeanError(Metric):
    """The mean of an error over all labels that count, of any shape."""

    num_sums = 2
    dtype = torch.float64

    @abstractmethod
    def errors(self, differences: Tensor) -> Tensor:
        """Return the error of every element, given prediction − label."""

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the sum of the errors and the number of labels."""
        differences, counted = _differences(predictions, targets, mask, type(self).__name__)
        errors = torch.where(counted, self.errors(differences), 0.0)
        return torch.stack([errors.sum(), counted.sum()])

    def value(self, sums: list[float]) -> float:
        """Return the mean error."""
        return sums[0] / sums[1] if sums[1] else math.nan


@register("metric", "mae")
class MAE(_MeanError):
    """The mean absolute error.

    >>> mae = MAE(); mae.update(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])); mae.compute()
    1.5
    """

    name = "mae"

    def errors(self, differences: Tensor) -> Tensor:
        """Return the absolute differences."""
        return differences.abs()


@register("metric", "mse")
class MSE(_MeanError):
    """The mean squared error.

    >>> mse = MSE(); mse.update(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])); mse.compute()
    2.5
    """

    name = "mse"

    def errors(self, differences: Tensor) -> Tensor:
        """Return the squared differences."""
        return differences.square()


@register("metric", "rmse")
class RMSE(MSE):
    """The square root of the mean squared error over all elements."""

    name = "rmse"

    def value(self, sums: list[float]) -> float:
        """Return the root of the mean."""
        return math.sqrt(super().value(sums))


class _OfAll(Kept):
    """A metric of all predictions and labels of one shape, kept side by side: a mean over the last of two axes."""

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Keep predictions and labels. Does not synchronise."""
        predictions = _fitting(predictions, targets, type(self).__name__)
        size = targets.shape[-1] if targets.dim() > 1 else 1
        dtype = torch.float64 if torch.float64 in (predictions.dtype, targets.dtype) else torch.float32
        self._rows.append(torch.cat([one.to(dtype).reshape(-1, size) for one in (predictions, targets)], 1))

    def compute(self) -> float:
        """Return the mean of the outputs; nan if there is nothing, or if a prediction is NaN. Synchronises."""
        rows = self.all_rows()
        if rows is None:
            return math.nan
        pairs = rows.double().numpy().reshape(len(rows), 2, -1).transpose(2, 1, 0)
        return float(np.mean([self.of_output(*pair[:, ~np.isnan(pair[1])]) for pair in pairs]))

    @abstractmethod
    def of_output(self, predictions: Array, targets: Array) -> float:
        """Return the value of one output."""


@register("metric", "r2")
class R2(_OfAll):
    """The share of the labels' variance that predictions explain, the mean over the last of two dimensions.

    It is nan with fewer than two labels. Constant labels give 1 if all predictions are right, else 0, as in
    scikit-learn.

    >>> r2 = R2(); r2.update(torch.tensor([2.5, 0.0, 2.0, 8.0]), torch.tensor([3.0, -0.5, 2.0, 7.0]))
    >>> round(r2.compute(), 4)
    0.9486
    """

    name = "r2"

    def of_output(self, predictions: Array, targets: Array) -> float:
        """Return 1 − squared errors / squared deviations."""
        errors = float(np.square(predictions - targets).sum())
        if len(targets) < 2 or math.isnan(errors):
            return math.nan
        deviations = float(np.square(targets - targets.mean()).sum())
        return 1 - errors / deviations if deviations else float(errors == 0)


@register("metric", "spearman")
class Spearman(_OfAll):
    """Spearman's rank correlation of predictions and labels of one shape: the mean over the last of two dimensions.

    It is nan if one of them is constant. Labels that are NaN do not count; a NaN prediction makes the result nan.

    >>> spearman = Spearman()
    >>> spearman.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, 20.0, 30.0]))
    >>> spearman.compute()
    1.0
    """

    name = "spearman"

    def of_output(self, predictions: Array, targets: Array) -> float:
        """Return the correlation of the ranks, in which ties have their mean rank."""
        if np.isnan(predictions).any() or not len(targets):
            return math.nan
        one, other = (ranks - ranks.mean() for ranks in (_ranks(predictions), _ranks(targets)))
        spread = math.sqrt((one @ one) * (other @ other))
        return float(one @ other / spread) if spread else math.nan


def _ranks(values: Array) -> Array:
    """Return the rank of every value, 1 for the smallest; equal values share their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _fitting(predictions: Tensor, targets: Tensor, who: str) -> Tensor:
    """Return predictions in the shape of the labels, without a last dimension of 1."""
    if predictions.shape == (*targets.shape, 1):
        predictions = predictions[..., 0]
    if predictions.shape != targets.shape:
        raise DataError(
            f"{who}: predictions {form_of(predictions)} do not fit targets {form_of(targets)}; a regression needs one "
            "prediction for every label"
        )
    return predictions


def _differences(predictions: Tensor, targets: Tensor, mask: Tensor | None, who: str) -> tuple[Tensor, Tensor]:
    """Return prediction − label in float64, and which labels count."""
    predictions = _fitting(predictions, targets, who)
    wide: Any = torch.float32 if predictions.is_mps else torch.float64
    return predictions.to(wide) - targets.to(wide), counted_labels(targets, mask, None, who)
