"""Precision, recall, F1 and the confusion matrix, for two classes, several classes and several labels.

    Precision()                   binary: predictions and targets (…)
    Precision(num_classes=5)      classes: class ids (…) or logits (…, 5), targets (…)
    Precision(num_labels=5)       labels: predictions and targets (…, 5), each label 0 or 1, any may be missing

Floating-point predictions are logits. Elements with a mask of 0 or the label `ignore_index` do not count, nor do
binary labels that are NaN. A NaN prediction is never correct: it predicts no class, and its label counts as missed.
"""

import math
from abc import abstractmethod
from typing import Annotated, Literal, get_args

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import ConfigError, DataError
from etude.metrics.base import Metric, Tally
from etude.metrics.inputs import (
    counted_elements,
    counted_labels,
    form_of,
    predicted_classes,
    predicted_positives,
)

Average = Literal["macro", "micro", "weighted"]
NumClasses = Annotated[int, Ge(2)] | None
NumLabels = Annotated[int, Ge(1)] | None
Threshold = Annotated[float, Gt(0), Lt(1)]


class Classified(Tally):
    """Shared by precision, recall, F1 and the confusion matrix: the kind of input, and how it is interpreted."""

    @checked
    def __init__(
        self,
        num_classes: NumClasses,
        num_labels: NumLabels,
        threshold: Threshold,
        ignore_index: int | None,
        class_dim: int | None,
    ) -> None:
        super().__init__()
        if num_classes is not None and num_labels is not None:
            raise ConfigError(
                f"{type(self).__name__}: set num_classes for classes or num_labels for labels, not both"
            )
        self.num_classes, self.num_labels, self.threshold = num_classes, num_labels, threshold
        self.ignore_index, self.class_dim = ignore_index, class_dim

    @property
    def size(self) -> int:
        """Number of classes or labels: 1 for binary."""
        return self.num_classes or self.num_labels or 1

    def read_classes(
        self, predictions: Tensor, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return predicted and true class ids, whether labels and whether predictions count (int64), each 1-D.

        Ids that do not count are 0. A NaN prediction does not count, but its label does.
        """
        who = type(self).__name__
        if targets.is_floating_point():
            raise DataError(f"{who}: targets {form_of(targets)} are not class ids; they must be integers")
        classes, none = predicted_classes(predictions, targets, self.size, self.class_dim, who)
        counted = counted_elements(targets, mask, self.ignore_index, who)
        named = counted & ~none
        predicted = classes.long().masked_fill(~named, 0).flatten()
        true = targets.long().masked_fill(~counted, 0).flatten()
        return predicted, true, counted.flatten().long(), named.flatten().long()

    def read_labels(
        self, predictions: Tensor, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return which labels are predicted yes, predicted no, true and counted: bools (elements, labels)."""
        who = type(self).__name__
        if self.num_labels is not None and targets.shape[-1:] != (self.num_labels,):
            raise DataError(
                f"{who}: targets {form_of(targets)} do not fit num_labels {self.num_labels}, their last dimension"
            )
        yes, no = predicted_positives(predictions, targets, self.threshold, who)
        counted = counted_labels(targets, mask, self.ignore_index, who)
        read = (yes & counted, no & counted, (targets > 0.5) & counted, counted)
        return tuple(values.reshape(-1, self.size) for values in read)  # type: ignore[return-value]

    def count_ids(self, size: int, ids: Tensor, counted: Tensor, read: tuple[Tensor, ...]) -> Tensor:
        """Return how often each id below `size` occurs among those counted; raise DataError for a larger one.

        Not `bincount`, which reads the largest id from the device.
        """
        try:
            return counted.new_zeros(size).scatter_add_(0, ids, counted)
        except RuntimeError as error:  # only on the CPU; on a GPU an assertion in the kernel ends the process
            for what, found in zip(("predictions", "targets"), read[:2], strict=True):
                wrong = found[(found < 0) | (found >= self.size)]
                if wrong.numel():
                    raise DataError(
                        f"{type(self).__name__}: {what} hold the class {int(wrong[0])}, but num_classes is {self.size} "
                        f"(0 … {self.size - 1})"
                    ) from error
            raise


class ClassScore(Classified, Metric):
    """Ratio of correct positives to others per class or label, averaged to one number.

    - macro: the mean over classes; classes that neither occurred nor were predicted do not count, nor do labels
      that were missing in every sample
    - micro: all classes pooled
    - weighted: the mean weighted by how often each class occurs

    A ratio of 0 to 0 is 0. Without any data the value is nan.
    """

    def __init__(
        self,
        num_classes: NumClasses = None,
        num_labels: NumLabels = None,
        average: Average = "macro",
        threshold: Threshold = 0.5,
        ignore_index: int | None = -100,
        class_dim: int | None = None,
    ) -> None:
        super().__init__(num_classes, num_labels, threshold, ignore_index, class_dim)
        if average not in get_args(Average):
            raise ConfigError(
                f"{type(self).__name__}: average is '{average}'; it must be one of {', '.join(get_args(Average))}"
            )
        self.average = average
        self.num_sums = 4 * self.size

    @abstractmethod
    def ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:
        """Return numerator and denominator of the score, given how often a class was correct, predicted and true."""

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return for every class how often it was correct, predicted and true, and how often it occurred at all."""
        if self.num_classes is None:
            predicted, _, true, counts = self.read_labels(predictions, targets, mask)
            return torch.stack([predicted & true, predicted, true, counts]).sum(1).flatten()
        classes, labels, counted, named = read = self.read_classes(predictions, targets, mask)
        right = self.count_ids(self.size, labels, named * (classes == labels), read)
        predicted = self.count_ids(self.size, classes, named, read)
        true = self.count_ids(self.size, labels, counted, read)
        return torch.cat([right, predicted, true, predicted + true])

    def value(self, sums: list[float]) -> float:
        """Return the average of the scores over the classes that occurred."""
        columns = [sums[start : start + self.size] for start in range(0, self.num_sums, self.size)]
        rows = [(right, predicted, true) for right, predicted, true, seen in zip(*columns, strict=True) if seen]
        if not rows:
            return math.nan
        if self.average == "micro":
            return self._score(*map(sum, zip(*rows, strict=True)))
        scores = [self._score(*row) for row in rows]
        if self.average == "macro":
            return sum(scores) / len(scores)
        supports: list[float] = [true for _, _, true in rows]
        return sum(score * n for score, n in zip(scores, supports, strict=True)) / (sum(supports) or 1)

    def _score(self, right: float, predicted: float, true: float) -> float:
        numerator, denominator = self.ratio(right, predicted, true)
        return numerator / denominator if denominator else 0.0


@register("metric", "precision")
class Precision(ClassScore):
    """The share of positive predictions that are correct.

    >>> precision = Precision()
    >>> precision.update(torch.tensor([2.0, 1.0, -1.0, 3.0]), torch.tensor([1, 0, 1, -100]))
    >>> precision.compute()
    0.5
    """

    def ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:  # noqa: ARG002
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

    def ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:  # noqa: ARG002
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

    def ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:
        """Return 2·correct / (predicted + true)."""
        return 2 * right, predicted + true


class ConfusionMatrix(Classified):
    """How often each true class (row) was predicted as each class (column); NaN predictions have no column.

    >>> matrix = ConfusionMatrix(num_classes=3)
    >>> matrix.update(torch.tensor([0, 2, 1, 1]), torch.tensor([0, 1, 1, -100]))
    >>> matrix.compute().tolist()
    [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    """

    def __init__(
        self,
        num_classes: NumClasses = None,
        num_labels: NumLabels = None,
        threshold: Threshold = 0.5,
        ignore_index: int | None = -100,
        class_dim: int | None = None,
    ) -> None:
        super().__init__(num_classes, num_labels, threshold, ignore_index, class_dim)
        self.num_sums = self.size**2 if num_classes is not None else 4 * self.size

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the counts of the cells in row-major order."""
        if self.num_classes is not None:
            classes, labels, _, named = read = self.read_classes(predictions, targets, mask)
            # An invalid class would fall into a cell of another row: move it beyond the last one.
            beyond = (classes < 0) | (classes >= self.size)
            cells = torch.where(beyond, self.num_sums, labels * self.size + classes)
            return self.count_ids(self.num_sums, cells, named, read)
        yes, no, true, _ = self.read_labels(predictions, targets, mask)
        return torch.stack([row & column for row in (~true, true) for column in (no, yes)], -1).sum(0).flatten()

    def compute(self) -> Tensor:
        """Return counts, int64 on the CPU: (C, C), (2, 2) if binary, (K, 2, 2) for K labels. Synchronises."""
        counts = self.state().cpu()
        if self.num_classes is not None:
            return counts.view(self.size, self.size)
        return counts.view(2, 2) if self.num_labels is None else counts.view(self.size, 2, 2)
