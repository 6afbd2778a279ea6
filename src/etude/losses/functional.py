"""Cross entropy and accuracy as sums and counts.

Nothing here synchronises: a count that depends on the data stays a tensor.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.core.errors import DataError, TrainingError
from etude.core.task import LossTerm

P = ParamSpec("P")
IGNORE_INDEX = -100
"""The label that torch and most data sets use for positions without a label."""
EXACT_IN_FLOAT32 = 2**24
"""Up to this value a sum of ones is exact in float32."""
REDUCE_SUM = 2
"""ATen's code for reduction="sum"."""
_LARGEST = math.log(1.7e308)
"""The largest number whose exponential is finite."""
NO_LABEL = -(2**31)
"""A label that never occurs: used if no label is ignored."""


def cross_entropy_term(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = IGNORE_INDEX,
    class_weights: Tensor | None = None,
    class_dim: int = -1,
) -> LossTerm:
    """Return the sum of the cross entropy and the number of elements that count.

    `targets` are class indices shaped like `logits` without the class dimension, or class probabilities shaped like
    `logits`. `mask` is shaped like the indices: elements where it is 0 do not count; a floating-point mask weights
    the others. With `ignore_index=None` every label must be a class, and without a mask the count is a plain number.
    With `class_weights` the count of indices is the sum of their weights, as in torch. Half-precision logits are
    computed in float32. Raises DataError for labels out of range, TrainingError for shapes that do not fit.
    """
    skip = NO_LABEL if ignore_index is None else ignore_index
    hard = not targets.is_floating_point()
    weighs = mask is not None and (mask.is_floating_point() or not hard)
    if mask is not None and hard:
        targets = mask_labels(targets, mask, skip)
    elif mask is not None and mask.shape != logits.select(class_dim, 0).shape:
        raise TrainingError(
            f"a mask of shape {tuple(mask.shape)} does not fit an output of shape {tuple(logits.shape)}"
        )
    rows, labels, weights = _as_rows(logits, targets, class_weights, class_dim)
    all_count = not hard or (mask is None and ignore_index is None and weights is None)
    try:
        if mask is not None and weighs:
            losses = F.cross_entropy(rows, labels, weights, None, skip, None, "none", label_smoothing)
            return _weighted_term(losses, targets, mask, skip, weights)
        if not all_count and label_smoothing == 0 and rows.dim() == 2 and labels.numel() <= EXACT_IN_FLOAT32:
            # The kernel also returns the total weight of the counted labels: using it saves two kernels.
            log_probs = torch.log_softmax(rows, 1)
            return LossTerm(*torch.ops.aten.nll_loss_forward.default(log_probs, labels, weights, REDUCE_SUM, skip))
        total = F.cross_entropy(rows, labels, weights, None, skip, None, "sum", label_smoothing)
    except (IndexError, RuntimeError, ValueError) as error:
        raise_explained(error, logits, targets, skip, weights, class_dim)
        raise
    if all_count:
        return LossTerm(total, labels.numel() if hard else rows.numel() // logits.shape[class_dim])
    return LossTerm(total, count_labels(labels, skip, weights))


def mean_of(term: LossTerm) -> Tensor:
    """Return sum / count, or 0 if the count is 0.

    >>> mean_of(LossTerm(torch.tensor(0.0), torch.tensor(0)))
    tensor(0.)
    """
    if isinstance(term.count, Tensor):
        return term.sum / torch.where(term.count == 0, 1, term.count)
    return term.sum / (term.count or 1)


def averaged(term: Callable[P, LossTerm]) -> Callable[P, Tensor]:
    """Return a function with the same arguments that returns the mean over the counted elements, or 0.

    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    >>> round(cross_entropy(logits, torch.tensor([[0, 1, 1]]), mask=torch.tensor([[1, 1, 0]])).item(), 4)
    0.1269
    """

    def mean(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return mean_of(term(*args, **kwargs))

    functools.update_wrapper(mean, term)
    mean.__signature__ = inspect.signature(term).replace(return_annotation=Tensor)  # type: ignore[attr-defined]
    mean.__name__ = mean.__qualname__ = term.__name__.removesuffix("_term")
    mean.__doc__ = f"Return the mean over the counted elements, or 0; arguments as for `{term.__name__}`."
    return mean


cross_entropy = cross_entropy_loss = averaged(cross_entropy_term)


def nll_term(
    log_probs: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORE_INDEX,
    class_weights: Tensor | None = None,
    class_dim: int = -1,
) -> LossTerm:
    """Return the sum of −log_probs at the labels, and the number of counted labels (with weights: their sum)."""
    check_shapes(log_probs, targets, class_dim)
    rows, labels, weights = _as_rows(log_probs, targets, class_weights, class_dim)
    try:
        total = F.nll_loss(rows, labels, weights, ignore_index=ignore_index, reduction="sum")
    except (IndexError, RuntimeError, ValueError) as error:
        raise_explained(error, log_probs, targets, ignore_index, weights, class_dim)
        raise
    return LossTerm(total, count_labels(labels, ignore_index, weights))


def accuracy_term(
    logits: Tensor,
    targets: Tensor,
    count: Tensor | float,
    ignore_index: int | None = IGNORE_INDEX,
    class_dim: int = -1,
) -> LossTerm:
    """Return how many of `count` labels have the largest logit: a metric, without gradient. NaN predicts no class.

    >>> accuracy_term(torch.eye(3), torch.tensor([0, 1, 0]), 3).sum
    tensor(2)
    """
    if targets.is_floating_point():
        targets = targets.argmax(class_dim)
    largest, predicted = logits.detach().max(class_dim)
    correct = predicted.eq(targets).logical_and_(
        largest.eq(largest)
    )  # NaN is the largest if present, and equals nothing
    if ignore_index is not None and ignore_index >= 0:  # a negative label is not a class: no prediction equals it
        correct = correct & targets.ne(ignore_index)
    return LossTerm(correct.count_nonzero(), count, 0.0)


def perplexity(mean_loss: float) -> float:
    """Return exp of a mean cross entropy in nats: the effective number of equally likely tokens to choose from.

    >>> round(perplexity(math.log(50257))), perplexity(1e9), perplexity(math.nan)
    (50257, inf, nan)
    """
    return math.inf if mean_loss > _LARGEST else math.exp(mean_loss)


def mask_labels(targets: Tensor, mask: Tensor, ignore_index: int) -> Tensor:
    """Return the labels with `ignore_index` where `mask` is 0."""
    if mask.shape != targets.shape:
        raise TrainingError(
            f"a mask of shape {tuple(mask.shape)} does not fit labels of shape {tuple(targets.shape)}"
        )
    return targets.long().masked_fill(mask == 0, ignore_index)


def _as_rows(
    logits: Tensor, targets: Tensor, class_weights: Tensor | None, class_dim: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits, targets and weights as torch expects them: at least float32, int64, classes in dimension 1."""
    if logits.dtype is torch.bfloat16 or logits.dtype is torch.float16:
        logits = logits.float()
    soft = targets.is_floating_point()
    if targets.dtype is not torch.int64:
        targets = targets.to(logits.dtype if soft else torch.int64)
    if class_weights is not None:
        class_weights = class_weights.to(logits)
    if class_dim == -1 and logits.dim() > 2:
        check_shapes(logits, targets, class_dim)
        return logits.flatten(0, -2), targets.flatten(0, -2) if soft else targets.flatten(), class_weights
    return logits, targets, class_weights


def _weighted_term(
    losses: Tensor, targets: Tensor, mask: Tensor, ignore_index: int, class_weights: Tensor | None
) -> LossTerm:
    """Return the sum of losses with a weight per element, and the sum of the counted weights."""
    counted = mask
    if not targets.is_floating_point():
        counted = mask * targets.ne(ignore_index)
        if class_weights is not None:
            counted = counted * label_weights(targets, class_weights, ignore_index)
    return LossTerm((losses.view(mask.shape) * mask).sum(), counted.sum())


def count_labels(targets: Tensor, ignore_index: int | None, class_weights: Tensor | None = None) -> Tensor | float:
    """Return how many labels are not `ignore_index`; with class weights, the sum of their weights."""
    if class_weights is not None:
        return label_weights(targets, class_weights, ignore_index).sum()
    return targets.numel() if ignore_index is None else targets.ne(ignore_index).sum()


def label_weights(targets: Tensor, class_weights: Tensor, ignore_index: int | None) -> Tensor:
    """Return the weight of every label, 0 for ignored ones."""
    ignored = targets == (NO_LABEL if ignore_index is None else ignore_index)
    weights = class_weights.to(targets.device)[targets.masked_fill(ignored, 0).long()]
    return weights.masked_fill(ignored, 0.0)


def raise_explained(
    error: Exception, logits: Tensor, targets: Tensor, ignore_index: int, weights: Tensor | None, class_dim: int
) -> None:
    """Raise a clear error instead of torch's, if a label is out of range or a shape does not fit."""
    check_shapes(logits, targets, class_dim)
    num_classes = logits.shape[class_dim]
    if weights is not None and weights.shape != (num_classes,):
        raise TrainingError(
            f"there are {weights.numel()} class weights, but the model's output has {num_classes} classes; pass one "
            "weight per class"
        ) from error
    if not isinstance(error, IndexError):
        return
    bad = targets[(targets != ignore_index) & ((targets < 0) | (targets >= num_classes))]
    hint = f"; set ignore_index: {IGNORE_INDEX} to ignore such elements" if (bad == IGNORE_INDEX).any() else ""
    raise DataError(
        f"labels out of range: found {int(bad[0])}, but the model's output has {num_classes} classes "
        f"(0 … {num_classes - 1}){hint}"
    ) from error


def check_shapes(logits: Tensor, targets: Tensor, class_dim: int) -> None:
    """Raise TrainingError if the labels are neither class indices nor probabilities for these logits."""
    if logits.dim() == 0:
        raise TrainingError("the model's output is a single number; return one logit per class for cross entropy")
    found = tuple(targets.shape)
    indices = list(logits.shape)
    indices.pop(class_dim)
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            raise TrainingError(
                f"floating-point labels of shape {found} do not fit the model's output of shape "
                f"{tuple(logits.shape)}: class probabilities have the same shape, class indices are integers of "
                f"shape {tuple(indices)}"
            )
    elif list(found) != indices:
        raise TrainingError(
            f"labels of shape {found} do not fit the model's output of shape {tuple(logits.shape)}: expected "
            f"{tuple(indices)}, class indices (use labels.squeeze or labels.argmax), or floating-point probabilities"
        )
