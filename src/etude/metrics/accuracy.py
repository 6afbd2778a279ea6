"""Accuracy: how many of the elements that count are predicted right."""

import math
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from etude.config.registry import register
from etude.core.errors import ConfigError, DataError
from etude.metrics.base import Metric
from etude.metrics.inputs import class_dim_of, counted_elements, form_of


def accuracy_counts(
    predictions: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int | None = -100,
    top_k: int = 1,
    class_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how many elements are right and how many count, as 0-dim int64 tensors on the device.

    An element with a NaN among its logits is wrong.

    `predictions` are class ids with the shape of `targets`, or logits with one dimension more: the classes are the
    last dimension, (N, C) and (B, L, C), or the second, (N, C, H, W). Where the shapes allow both, say `class_dim`.

    >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    >>> correct, count = accuracy_counts(logits, torch.tensor([1, 1, -100]))
    >>> int(correct), int(count)
    (1, 2)
    """
    if predictions.shape == targets.shape:
        if predictions.is_floating_point() or top_k != 1:
            raise DataError(
                f"accuracy: predictions {form_of(predictions)} have the shape of the targets, which fits class ids "
                f"(integers) and top_k 1 only; give class ids, or logits with one more dimension"
            )
        right = predictions == targets
    else:
        right = _right(predictions, targets, top_k, class_dim)
    counts = counted_elements(targets, mask, ignore_index, "accuracy")
    if counts is None:
        return right.sum(), torch.full((), targets.numel(), dtype=torch.int64, device=targets.device)
    return (right & counts).sum(), counts.sum()


@register("metric", "accuracy")
class Accuracy(Metric):
    """Share of right predictions over everything seen, exact over batches and ranks.

    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0]))
    >>> accuracy.update(torch.tensor([[0.2, 0.8]]), torch.tensor([1]))
    >>> accuracy.compute()
    0.75
    """

    num_sums = 2

    def __init__(
        self, top_k: Annotated[int, Ge(1)] = 1, ignore_index: int | None = -100, class_dim: int | None = None
    ) -> None:
        super().__init__()
        if top_k < 1:
            raise ConfigError(f"Accuracy: top_k is {top_k}; it must be at least 1")
        self.top_k, self.ignore_index, self.class_dim = top_k, ignore_index, class_dim

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the number of right elements and of elements that count."""
        counts = accuracy_counts(
            predictions,
            targets,
            mask=mask,
            ignore_index=self.ignore_index,
            top_k=self.top_k,
            class_dim=self.class_dim,
        )
        return torch.stack(counts)

    def value(self, sums: list[float]) -> float:
        """Return the share of right elements."""
        correct, count = sums
        return correct / count if count else math.nan


def _right(logits: Tensor, targets: Tensor, top_k: int, class_dim: int | None) -> Tensor:
    """Return which elements have their target among the `top_k` highest logits."""
    dim = class_dim_of(logits, targets, class_dim, "accuracy")
    if top_k == 1:
        largest, predicted = logits.max(dim)  # NaN if one of the logits is
        return (predicted == targets) & ~largest.isnan()
    if top_k > logits.shape[dim]:
        raise ConfigError(f"accuracy: top_k is {top_k} but there are {logits.shape[dim]} classes; lower top_k")
    largest, predicted = logits.topk(top_k, dim)
    return (predicted == targets.unsqueeze(dim)).any(dim) & ~largest.isnan().any(dim)
