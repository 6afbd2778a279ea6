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
from etude.distributed import World
from etude.metrics.base import Kept, Metric, Tally, gathered_rows
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


@register("metric", "r2")
class R2(Tally):
    """The share of the labels' variance that predictions explain, the mean over the last of two dimensions.

    It is nan with fewer than two labels. Constant labels give 1 if all predictions are right, else 0, as in
    scikit-learn.

    >>> r2 = R2(); r2.update(torch.tensor([2.5, 0.0, 2.0, 8.0]), torch.tensor([3.0, -0.5, 2.0, 7.0]))
    >>> round(r2.compute(), 4)
    0.9486
    """

    name = "r2"
    dtype = torch.float64
    num_sums = 0
    """Four numbers per output: count, mean and squared deviations of the labels, squared errors. Means of batches and
    ranks are combined instead of sums of squares, which would lose the digits of a small variance."""

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Add one batch. Does not synchronise."""
        differences, counted = _differences(predictions, targets, mask, "R2")
        size = targets.shape[-1] if targets.dim() > 1 else 1
        differences, counted, labels = (one.reshape(-1, size) for one in (differences, counted, targets.double()))
        count = counted.sum(0)
        mean = torch.where(counted, labels, 0.0).sum(0) / count.clamp(min=1)
        deviations = torch.where(counted, labels - mean, 0.0).square().sum(0)
        errors = torch.where(counted, differences, 0.0).square().sum(0)
        batch = torch.stack([count.double(), mean, deviations, errors])
        if self._sums is None:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside it
                self._sums = torch.zeros(batch.numel(), dtype=torch.float64, device=batch.device)
        sums = self.sums_on(batch.device)
        sums.copy_(_combined(sums.view(4, -1), batch).flatten())

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Not used: batches are combined, not added."""
        raise NotImplementedError

    def gather(self, world: World, device: torch.device) -> None:  # noqa: ARG002 - ranks exchange bytes on the host
        """Combine the numbers of all ranks."""
        if world.size > 1:
            found = gathered_rows(world, None if self._sums is None else self.state().cpu()[None])
            total = found[0].view(4, -1) if found else torch.zeros(4, 0, dtype=torch.float64)
            for one in found[1:]:
                total = _combined(total, one.view(4, -1))
            self.load_state(total.flatten())

    def merge(self, other: "R2") -> None:
        """Add the data of another one."""
        parts = [one.state().cpu().view(4, -1) for one in (self, other) if one._sums is not None]
        if parts:
            self.load_state((_combined(*parts) if len(parts) == 2 else parts[0]).flatten())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers, of as many outputs as there are; none if it was saved before its first batch."""
        if state["sums"].numel():
            self.load_state(state["sums"])
        else:
            self._sums = None

    def compute(self) -> float:
        """Return the value over everything since the last reset; nan if there is nothing. Synchronises."""
        columns = self.state().view(4, -1).t().tolist()
        scores = [_explained(*column) for column in columns]
        return sum(scores) / len(scores) if scores else math.nan


def _combined(one: Tensor, other: Tensor) -> Tensor:
    """Return count, mean, squared deviations and squared errors of two sets of labels together."""
    (count, mean, deviations, errors), (more, mean2, deviations2, errors2) = one, other
    total, apart = count + more, mean2 - mean
    share = more / total.clamp(min=1)
    spread = deviations + deviations2 + apart.square() * count * share
    return torch.stack([total, mean + apart * share, spread, errors + errors2])


def _explained(count: float, _mean: float, deviations: float, errors: float) -> float:
    if count < 2 or math.isnan(errors):
        return math.nan
    return 1 - errors / deviations if deviations else float(errors == 0)


@register("metric", "spearman")
class Spearman(Kept):
    """Spearman's rank correlation of predictions and labels of one shape: the mean over the last of two dimensions.

    It is nan if one of them is constant. Labels that are NaN do not count; a NaN prediction makes the result nan.

    >>> spearman = Spearman()
    >>> spearman.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, 20.0, 30.0]))
    >>> spearman.compute()
    1.0
    """

    name = "spearman"

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Keep predictions and labels side by side. Does not synchronise."""
        predictions = _fitting(predictions, targets, "Spearman")
        size = targets.shape[-1] if targets.dim() > 1 else 1
        dtype = torch.float64 if torch.float64 in (predictions.dtype, targets.dtype) else torch.float32
        rows = torch.cat([one.to(dtype).reshape(-1, size) for one in (predictions, targets)], 1)
        self._rows.append(rows)

    def compute(self) -> float:
        """Return the mean correlation of the ranks, in which ties have their mean rank; nan if there is nothing."""
        rows = self.all_rows()
        if rows is None:
            return math.nan
        pairs = rows.double().numpy().reshape(len(rows), 2, -1).transpose(2, 1, 0)
        return float(np.mean([_correlation(*pair[:, ~np.isnan(pair[1])]) for pair in pairs]))


def _correlation(predictions: Array, targets: Array) -> float:
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
