"""Metrics of numbers (MAE, MSE, RMSE, R²) and of probabilities (perplexity, calibration error), as sums in float64.

Labels that are NaN do not count in a regression; class labels equal to `ignore_index` do not count in the others. A NaN
prediction makes the result nan.
"""

import math
from abc import abstractmethod
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import DataError
from etude.distributed import World
from etude.metrics.base import Metric, Tally, gathered_rows
from etude.metrics.inputs import (
    binary_scores,
    class_dim_of,
    counted_elements,
    counted_labels,
    form_of,
    inferred_classes,
)


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
        """Restore the numbers, of as many outputs as there are."""
        self.load_state(state["sums"])

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


@register("metric", "perplexity")
class Perplexity(Metric):
    """The exponential of the mean cross entropy of logits (…, C) or (N, C, …) and class ids.

    >>> perplexity = Perplexity(); perplexity.update(torch.zeros(3, 8), torch.tensor([0, 5, -100]))
    >>> round(perplexity.compute(), 4)
    8.0
    """

    name = "perplexity"
    num_sums = 2
    dtype = torch.float64

    def __init__(self, ignore_index: int | None = -100, class_dim: int | None = None) -> None:
        super().__init__()
        self.ignore_index, self.class_dim = ignore_index, class_dim

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the sum of −log p and the number of labels."""
        dim = class_dim_of(predictions, targets, self.class_dim, "Perplexity")
        counted = counted_elements(targets, mask, self.ignore_index, "Perplexity").flatten()
        logits = predictions.movedim(dim, -1).reshape(-1, predictions.shape[dim])
        labels = targets.flatten().long().masked_fill(~counted, -100)
        losses = F.cross_entropy(
            logits.float() if logits.dtype is not torch.float64 else logits, labels, reduction="none"
        )
        return torch.stack([losses.double().sum(), counted.sum()])

    def value(self, sums: list[float]) -> float:
        """Return the exponential of the mean."""
        try:
            return math.exp(sums[0] / sums[1]) if sums[1] else math.nan
        except OverflowError:
            return math.inf


@register("metric", "calibration_error")
class CalibrationError(Metric):
    """The expected calibration error: the mean distance of confidence and accuracy in bins of equal width.

    The confidence of classes is the largest softmax; that of a binary label is the probability of a positive.

    >>> error = CalibrationError(); error.update(torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1, 1, 1, 0]))
    >>> error.compute()
    0.25
    """

    name = "calibration_error"
    dtype = torch.float64

    @checked
    def __init__(
        self, num_bins: Annotated[int, Ge(1)] = 15, ignore_index: int | None = -100, class_dim: int | None = None
    ) -> None:
        super().__init__()
        self.num_bins, self.ignore_index, self.class_dim = num_bins, ignore_index, class_dim
        self.num_sums = 3 * num_bins

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return for every bin the number of labels, and the sums of confidence and of correct predictions."""
        who = "CalibrationError"
        wide = predictions.double() if not predictions.is_mps else predictions.float()
        if inferred_classes(predictions, targets, self.class_dim, who) is None:
            confidence = binary_scores(wide, targets, who).sigmoid()
            right, counted = targets > 0.5, counted_labels(targets, mask, self.ignore_index, who)
        else:
            dim = class_dim_of(predictions, targets, self.class_dim, who)
            confidence, classes = wide.softmax(dim).max(dim)
            right, counted = classes == targets, counted_elements(targets, mask, self.ignore_index, who)
        last = self.num_bins - 1
        bins = (confidence.nan_to_num(0.0) * self.num_bins).long().clamp(max=last).flatten()
        numbers = torch.stack([torch.ones_like(confidence), confidence, right.to(confidence)])
        numbers = torch.where(counted, numbers, 0.0).flatten(1)
        return numbers.new_zeros(3, self.num_bins).index_add_(1, bins, numbers).flatten()

    def value(self, sums: list[float]) -> float:
        """Return Σ |confidence − accuracy| of the bins, weighted by their numbers of labels."""
        counts, confidence, right = (
            sums[start : start + self.num_bins] for start in range(0, self.num_sums, self.num_bins)
        )
        apart = sum(abs(one - other) for one, other in zip(confidence, right, strict=True))
        return apart / sum(counts) if sum(counts) else math.nan


def _differences(predictions: Tensor, targets: Tensor, mask: Tensor | None, who: str) -> tuple[Tensor, Tensor]:
    """Return prediction − label in float64, and which labels count."""
    if predictions.shape == (*targets.shape, 1):
        predictions = predictions[..., 0]
    if predictions.shape != targets.shape:
        raise DataError(
            f"{who}: predictions {form_of(predictions)} do not fit targets {form_of(targets)}; a regression needs one "
            "prediction for every label"
        )
    wide: Any = torch.float32 if predictions.is_mps else torch.float64
    return predictions.to(wide) - targets.to(wide), counted_labels(targets, mask, None, who)
