"""Precision, recall, F1, balanced accuracy and the confusion matrix: binary, several classes and several labels.

    Precision()                   binary: predictions and targets (…); or classes, if the logits have more than two
    Precision(num_classes=5)      classes: class ids (…) or logits (…, 5), targets (…)
    Precision(num_labels=5)       labels: predictions and targets (…, 5), each label 0 or 1, any may be missing

Floating-point predictions are logits. Elements with a mask of 0 or the label `ignore_index` do not count, nor do
binary labels that are NaN. A NaN prediction is never correct: it predicts no class, and its label counts as missed.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from etude.config.registry import register
from etude.core.errors import ConfigError
from etude.metrics.base import PER_CLASS, named_scores
from etude.metrics.counts import ClassCounts, NumClasses, NumLabels, Threshold
from etude.metrics.picture import matrix_files

Average = Literal["macro", "micro", "weighted", "none"]


class ClassScore(ClassCounts):
    """Ratio of correct positives to others per class or label, averaged to one number.

    - macro: the mean over classes; classes that neither occurred nor were predicted do not count, nor do labels
      that were missing in every sample
    - micro: all classes pooled
    - weighted: the mean weighted by how often each class occurs
    - none: one number for every class (`f1_class0` …, or by `class_names`); nan for one that never occurred

    A ratio of 0 to 0 is 0. Without any data the value is nan.
    """

    def __init__(
        self,
        num_classes: NumClasses = None,
        num_labels: NumLabels = None,
        average: Average | None = "macro",
        threshold: Threshold = 0.5,
        ignore_index: int | None = -100,
        class_dim: int | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__(num_classes, num_labels, threshold, ignore_index, class_dim, class_names)
        average = "none" if average is None else average
        if average not in get_args(Average):
            raise ConfigError(
                f"{type(self).__name__}: average is '{average}'; it must be one of {', '.join(get_args(Average))}"
            )
        self.average = average
        self.name = type(self).name + PER_CLASS * (average == "none")

    @abstractmethod
    def ratio(self, right: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return numerator and denominator of the score, given how often a class was correct, predicted and true."""

    def value(self, sums: list[float]) -> float | list[float]:
        """Return the average of the scores over the classes that occurred, or all scores."""
        *counts, seen = self.columns(sums)
        if self.average == "none":
            return [self._score(*row) if n else math.nan for *row, n in zip(*counts, seen, strict=True)]
        rows = [row for *row, n in zip(*counts, seen, strict=True) if n]
        if not rows:
            return math.nan
        if self.average == "micro":
            return self._score(*map(sum, zip(*rows, strict=True)))
        scores = [self._score(*row) for row in rows]
        weights = [1 if self.average == "macro" else int(true) for _, _, true in rows]
        return sum(score * n for score, n in zip(scores, weights, strict=True)) / (sum(weights) or 1)

    def results(self) -> dict[str, float]:
        """Return the average, or one value per class."""
        value = self.compute()
        return named_scores(self.name, value, self.class_names) if isinstance(value, list) else {self.name: value}

    def _score(self, right: Any, predicted: Any, true: Any) -> float:
        numerator, denominator = self.ratio(right, predicted, true)
        return float(numerator / denominator) if denominator else 0.0


@register("metric", "precision")
class Precision(ClassScore):
    """The share of positive predictions that are correct.

    >>> precision = Precision()
    >>> precision.update(torch.tensor([2.0, 1.0, -1.0, 3.0]), torch.tensor([1, 0, 1, -100]))
    >>> precision.compute()
    0.5
    """

    name = "precision"

    def ratio(self, right: Any, predicted: Any, true: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return correct / predicted."""
        return right, predicted


@register("metric", "recall")
class Recall(ClassScore):
    """The share of actual positives that are predicted.

    >>> recall = Recall(num_classes=3, average="macro")
    >>> recall.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    >>> recall.compute()
    0.75
    """

    name = "recall"

    def ratio(self, right: Any, predicted: Any, true: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return correct / true."""
        return right, true


@register("metric", "f1")
class F1(ClassScore):
    """The harmonic mean of precision and recall: 2·correct / (predicted + true).

    >>> f1 = F1(num_labels=2, average="micro")
    >>> f1.update(torch.tensor([[1, 0], [1, 1]]), torch.tensor([[1, 0], [0, 1]]))
    >>> f1.compute()
    0.8
    """

    name = "f1"

    def ratio(self, right: Any, predicted: Any, true: Any) -> tuple[Any, Any]:
        """Return 2·correct / (predicted + true)."""
        return 2 * right, predicted + true


@register("metric", "balanced_accuracy")
class BalancedAccuracy(ClassCounts):
    """The mean recall of the classes that occur among the labels; of both classes if binary.

    >>> balanced = BalancedAccuracy(num_classes=3)
    >>> balanced.update(torch.tensor([0, 0, 2, 1]), torch.tensor([0, 0, 0, 1]))
    >>> round(balanced.compute(), 4)
    0.8333
    """

    name = "balanced_accuracy"

    def __init__(
        self,
        num_classes: NumClasses = None,
        threshold: Threshold = 0.5,
        ignore_index: int | None = -100,
        class_dim: int | None = None,
    ) -> None:
        super().__init__(num_classes, None, threshold, ignore_index, class_dim)

    def value(self, sums: list[float]) -> float:
        """Return the mean recall."""
        right, _, true, _ = self.columns(sums)
        if self.num_classes is None:
            cells = self.matrix(sums)[0]
            right, true = cells[(0, 1), (0, 1)], cells.sum(1)
        return float(np.mean(right[true > 0] / true[true > 0])) if true.any() else math.nan


@register("metric", "confusion_matrix")
class ConfusionMatrix(ClassCounts):
    """How often each true class (row) was predicted as each class (column); NaN predictions have no column.

    `normalized` divides by the sum of the row ("true"), of the column ("predicted") or of everything ("all"). The run
    folder gets the matrix of the last validation as `confusion_matrix.json`, and as a picture if it is not too large.

    >>> matrix = ConfusionMatrix(num_classes=3)
    >>> matrix.update(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 1, 1, -100]))
    >>> matrix.compute().tolist()
    [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    """

    name = "confusion_matrix"

    def __init__(
        self,
        num_classes: NumClasses = None,
        num_labels: NumLabels = None,
        threshold: Threshold = 0.5,
        ignore_index: int | None = -100,
        class_dim: int | None = None,
        normalized: Literal["true", "predicted", "all"] | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__(num_classes, num_labels, threshold, ignore_index, class_dim, class_names)
        if normalized not in (None, "true", "predicted", "all"):
            raise ConfigError(
                f"ConfusionMatrix: normalized is {normalized!r}; it must be true, predicted, all or None"
            )
        self.normalized, self.needs_matrix = normalized, True

    def value(self, sums: list[float]) -> Tensor:
        """Return the matrix from its counts."""
        cells = torch.from_numpy(self.matrix(sums)[..., :-1].copy())
        if self.num_classes is None and self.num_labels is None:
            cells = cells[0]
        if self.normalized is None:
            return cells
        dims = {"true": (-1,), "predicted": (-2,), "all": (-2, -1)}[self.normalized]
        total = cells.sum(dims, keepdim=True)
        return cells.double() / total.clamp(min=1)

    def compute(self) -> Tensor:
        """Return counts (int64) or shares, on the CPU: (C, C), (2, 2) if binary, (K, 2, 2) for labels. Synchronises."""
        return super().compute()  # type: ignore[no-any-return]

    def results(self) -> dict[str, float]:
        """Return nothing: a matrix is not a number. See `files`. Raises ConfigError for names of other classes."""
        if self.class_names is not None and self.is_settled:
            named_scores(self.name, [0.0] * (self.num_classes or self.num_labels or 2), self.class_names)
        return {}

    def files(self) -> Mapping[str, str]:
        """Return the matrix as JSON and, up to 100 classes, as a picture; nothing if it is empty."""
        matrix = self.compute()
        return matrix_files(self.name, matrix, self.class_names) if matrix.any() else {}
