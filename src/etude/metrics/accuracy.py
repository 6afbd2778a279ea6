"""Accuracy: the share of counted elements that are predicted correctly."""

import math
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import ConfigError, DataError
from etude.metrics.base import Metric
from etude.metrics.counts import ClassCounts
from etude.metrics.inputs import class_dim_of, counted_elements, counted_labels, form_of, predicted_positives


@register("metric", "accuracy", aliases={"k": "top_k"})
class Accuracy(Metric):
    """Share of correct predictions over everything seen, exact over batches and ranks.

    Predictions are class ids with the shape of the targets, or logits with one dimension more: the classes are the
    last dimension, (N, C) and (B, L, C), or the second, (N, C, H, W). If the shapes allow both, set `class_dim`. With
    a `threshold`, or a last dimension of 1, they are the logits of binary labels, one or several per sample. An
    element with a NaN among its logits is wrong.

    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0]))
    >>> accuracy.update(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
    >>> accuracy.compute()
    0.75
    """

    num_sums = 2

    @checked
    def __init__(
        self,
        top_k: Annotated[int, Ge(1)] = 1,
        ignore_index: int | None = -100,
        class_dim: int | None = None,
        threshold: Annotated[float, Gt(0), Lt(1)] | None = None,
    ) -> None:
        super().__init__()
        if threshold is not None and top_k != 1:
            raise ConfigError(f"Accuracy: top_k is {top_k} and threshold is {threshold}; binary labels have no top_k")
        self.threshold = threshold
        self.top_k, self.ignore_index, self.class_dim = top_k, ignore_index, class_dim
        self.name = "accuracy" if top_k == 1 else f"accuracy_top{top_k}"
        self.source: ClassCounts | None = None
        """Other metrics' counts of the same predictions, if there are any: they include the correct ones."""

    def can_read(self, counts: ClassCounts) -> bool:
        """Whether these counts include the correct predictions of all classes."""
        same = (counts.ignore_index, counts.class_dim, counts.num_labels) == (self.ignore_index, self.class_dim, None)
        return self.top_k == 1 and counts.threshold == (self.threshold or 0.5) and same

    def compute(self) -> float:
        """Return the share over everything since the last reset; nan if there is nothing. Synchronises."""
        return super().compute() if self.source is None else self.source.accuracy()

    def reset(self) -> None:
        """Reset to the initial state, with counts of its own."""
        self.source = None
        super().reset()

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the number of correct elements and of counted elements."""
        is_binary = predictions.is_floating_point() and predictions.shape == (*targets.shape, 1) and self.top_k == 1
        if self.threshold is not None or is_binary:
            yes, no = predicted_positives(predictions, targets, self.threshold or 0.5, "accuracy")
            right, counted = (
                torch.where(targets > 0.5, yes, no),
                counted_labels(targets, mask, self.ignore_index, "accuracy"),
            )
            return torch.stack([(right & counted).sum(), counted.sum()])
        counted = counted_elements(targets, mask, self.ignore_index, "accuracy")
        if predictions.shape != targets.shape:
            right = self._right(predictions, targets, counted)
        elif predictions.is_floating_point() or self.top_k != 1:
            raise DataError(
                f"accuracy: predictions {form_of(predictions)} have the shape of the targets, which fits class ids "
                f"(integers) and top_k 1 only; pass class ids, or logits with one more dimension, or set threshold for "
                "logits of binary labels"
            )
        else:
            right = predictions == targets
        return torch.stack([(right & counted).sum(), counted.sum()])

    def value(self, sums: list[float]) -> float:
        """Return the share of correct elements."""
        correct, count = sums
        return correct / count if count else math.nan

    def _right(self, logits: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Return which elements have their target among the `top_k` highest logits."""
        dim = class_dim_of(logits, targets, self.class_dim, "accuracy")
        if not targets.is_floating_point():
            self.check_classes(targets.masked_fill(~counted, 0), logits.shape[dim])
        if self.top_k > logits.shape[dim]:
            raise ConfigError(
                f"accuracy: top_k is {self.top_k} but there are {logits.shape[dim]} classes; lower top_k"
            )
        if self.top_k == 1:
            largest, predicted = logits.max(dim)  # NaN if any of the logits is NaN
            return (predicted == targets) & ~largest.isnan()
        largest, predicted = logits.topk(self.top_k, dim)
        return (predicted == targets.unsqueeze(dim)).any(dim) & ~largest.isnan().any(dim)
