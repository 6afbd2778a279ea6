"""Metrics of ranked scores: the area under the ROC curve, and average precision.

    AUROC()                   binary: logits and labels (…); or classes against the rest, if there are more than two
    AUROC(num_classes=5)      classes: logits (…, 5), labels (…): the softmax of each class against the rest
    AUROC(num_labels=5)       labels: logits and labels (…, 5), each label 0 or 1

The result is exact: scores are kept, 8 bytes per score and label in float32, and sorted at the end.
"""

import math
from abc import abstractmethod
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import ConfigError, DataError
from etude.metrics.base import Averaged, Kept
from etude.metrics.counts import NumClasses, NumLabels
from etude.metrics.inputs import (
    binary_scores,
    class_dim_of,
    counted_elements,
    counted_labels,
    form_of,
    inferred_classes,
)

Array = npt.NDArray[np.float64]


class Ranking(Averaged, Kept):
    """Shared by AUROC and average precision: a score and a binary label for every element, class or label.

    - macro: the mean over classes or labels
    - weighted: the mean weighted by the number of positives
    - none: one number for every class or label (`auroc_class0` …, or by `class_names`)

    Labels that are missing (`ignore_index`, NaN) do not count. A NaN score makes the result nan.
    """

    @checked
    def __init__(
        self,
        num_classes: NumClasses = None,
        num_labels: NumLabels = None,
        average: Literal["macro", "weighted", "none"] | None = "macro",
        ignore_index: int | None = -100,
        class_dim: int | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        if num_classes is not None and num_labels is not None:
            raise ConfigError(
                f"{type(self).__name__}: set num_classes for classes or num_labels for labels, not both"
            )
        self.choose(average, ("macro", "weighted", "none"), class_names)
        self.num_classes, self.num_labels = num_classes, num_labels
        self.ignore_index, self.class_dim = ignore_index, class_dim

    @abstractmethod
    def area(self, positives: Array, negatives: Array) -> float:
        """Return the value of one class, given how many labels of each kind have each score, highest score first."""

    # --- batches

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add one batch. Does not synchronise."""
        who = type(self).__name__
        classes = self.num_classes
        if classes is None and self.num_labels is None:
            classes = inferred_classes(predictions, targets, self.class_dim, who)
        if classes is None:
            self._rows.append(self._label_rows(predictions, targets))
        else:
            self._rows.append(self._class_rows(predictions, targets, classes))

    def _class_rows(self, logits: Tensor, targets: Tensor, classes: int) -> Tensor:
        """Return the probabilities of all classes, and which one is true: 0 … 1, NaN where there is no label."""
        who = type(self).__name__
        dim = class_dim_of(logits, targets, self.class_dim, who)
        if targets.is_floating_point() or logits.shape[dim] != classes:
            raise DataError(
                f"{who}: predictions {form_of(logits)} and targets {form_of(targets)} are not logits of num_classes "
                f"{classes} and class ids; make them equal"
            )
        wide = logits if logits.dtype is torch.float64 else logits.float()
        scores = wide.movedim(dim, -1).reshape(-1, classes).softmax(-1)
        counted = counted_elements(targets, None, self.ignore_index, who).flatten()
        ids = self.check_classes(targets.flatten().masked_fill(~counted, 0), classes)
        true = ids[:, None] == torch.arange(classes, device=targets.device)
        return torch.cat([scores, torch.where(counted[:, None], true.to(scores), math.nan)], 1)

    def _label_rows(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the scores of all labels, and the labels: 0, 1 or NaN."""
        who, size = type(self).__name__, self.num_labels or 1
        if self.num_labels is not None and targets.shape[-1:] != (self.num_labels,):
            raise DataError(f"{who}: targets {form_of(targets)} do not fit num_labels {size}, their last dimension")
        scores = binary_scores(predictions, targets, who)
        scores = scores if scores.dtype is torch.float64 else scores.float()
        counted = counted_labels(targets, None, self.ignore_index, who)
        labels = torch.where(counted, (targets > 0.5).to(scores), math.nan)
        return torch.cat([scores.reshape(-1, size), labels.reshape(-1, size)], 1)

    # --- the value

    def compute(self) -> float | list[float]:
        """Return the average, or all values; nan if there is nothing. Synchronises."""
        self.check_labels()
        values, weights = [], []
        rows = self.all_rows()
        columns = () if rows is None else zip(*rows.numpy().reshape(len(rows), 2, -1).transpose(1, 2, 0), strict=True)
        for score, label in columns:
            positives, negatives = (label == 1).astype(float), (label == 0).astype(float)
            counts = _by_score(score, positives, negatives)
            values.append(math.nan if counts is None else self.area(*counts))
            is_defined = self.is_defined(positives.sum(), negatives.sum())
            weights.append(is_defined * (positives.sum() if self.average == "weighted" else 1.0))
        if self.average == "none":
            return values
        there = [weight > 0 for weight in weights]  # not 0 · nan: a class without a value does not count
        return (
            float(np.average(np.array(values)[there], weights=np.array(weights)[there])) if any(there) else math.nan
        )

    def is_defined(self, positives: float, negatives: float) -> bool:
        """Whether a class or label with so many positives and negatives has a value."""
        return bool(positives + negatives)


def _by_score(scores: Array, positives: Array, negatives: Array) -> tuple[Array, Array] | None:
    """Return the numbers of positives and negatives of every distinct score, highest first; None if one is NaN."""
    there = positives + negatives > 0
    scores, positives, negatives = scores[there], positives[there], negatives[there]
    if np.isnan(scores).any():
        return None
    order = np.argsort(scores)[::-1]
    scores = scores[order]
    starts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]]) if len(scores) else np.empty(0, dtype=int)
    return tuple(np.add.reduceat(one[order], starts) if len(starts) else one for one in (positives, negatives))  # type: ignore[return-value]


@register("metric", "auroc")
class AUROC(Ranking):
    """The area under the ROC curve: the probability that a positive has a higher score than a negative.

    Classes or labels without positives or without negatives have no area: the average leaves them out, and is nan if
    no other is left.

    >>> auroc = AUROC()
    >>> auroc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> auroc.compute()
    0.75
    """

    name = "auroc"

    def area(self, positives: Array, negatives: Array) -> float:
        """Return the share of pairs in the right order; ties count half."""
        total = positives.sum() * negatives.sum()
        above = np.cumsum(positives) - positives / 2
        return float((above * negatives).sum() / total) if total else math.nan

    def is_defined(self, positives: float, negatives: float) -> bool:
        """Whether there are positives and negatives."""
        return bool(positives and negatives)


@register("metric", "average_precision")
class AveragePrecision(Ranking):
    """The mean precision over the positives, at the threshold of each: the area under the precision-recall curve.

    Without positives it is 0, as in scikit-learn.

    >>> precision = AveragePrecision()
    >>> precision.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> round(precision.compute(), 4)
    0.8333
    """

    name = "average_precision"

    def area(self, positives: Array, negatives: Array) -> float:
        """Return Σ precision · share of the positives with this score."""
        if not positives.sum():
            return 0.0 if len(negatives) else math.nan
        right = np.cumsum(positives)
        return float((right / (right + np.cumsum(negatives)) * positives).sum() / positives.sum())
