"""Metrics of probabilities: perplexity and calibration error, as sums in float64.

Class labels equal to `ignore_index` do not count. A NaN prediction makes the result nan.
"""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.metrics.base import Metric
from etude.metrics.inputs import binary_scores, class_dim_of, counted_elements, counted_labels, inferred_classes


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
        labels = self.check_classes(targets.flatten().long().masked_fill(~counted, 0), logits.shape[1])
        labels = labels.masked_fill(~counted, -100)
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
            self.check_classes(targets.masked_fill(~counted, 0), predictions.shape[dim])
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
