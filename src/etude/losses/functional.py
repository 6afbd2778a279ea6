"""Cross entropy and accuracy as sums and counts.

Nothing here waits for the device: a count that depends on the data stays a tensor.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.core.errors import DataError, TrainingError
from etude.core.terms import LossTerm

IGNORE_INDEX = -100
"""The label that torch and most data sets use for positions without a label."""
NO_LABEL = -(2**31)
"""A label that never occurs: stands in where no label is to be ignored."""


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = IGNORE_INDEX,
    class_weights: Tensor | None = None,
    class_dim: int = -1,
) -> Tensor:
    """Return the mean cross entropy over the elements that count; 0 if none does.

    The arguments are those of `cross_entropy_term`.

    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    >>> round(cross_entropy(logits, torch.tensor([[0, 1, 1]]), mask=torch.tensor([[1, 1, 0]])).item(), 4)
    0.1269
    """
    return mean_of(cross_entropy_term(logits, targets, mask, label_smoothing, ignore_index, class_weights, class_dim))


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
    `logits`. `mask` is shaped like the indices: elements where it is 0 do not count; a floating mask also weighs the
    others. With `ignore_index=None` every label must be a class, and without a mask the count is a plain number.
    With `class_weights` the count of indices is the sum of their weights, as in torch. Half-precision logits are
    computed in float32. Raises DataError for labels out of range, TrainingError for shapes that do not fit.
    """
    if mask is not None and mask.is_floating_point():
        return _weighted_term(logits, targets, mask, label_smoothing, ignore_index, class_weights, class_dim)
    skip = NO_LABEL if ignore_index is None else ignore_index
    hard = not targets.is_floating_point()
    if mask is not None:
        if not hard:
            mask = mask.to(torch.float32)
            return _weighted_term(logits, targets, mask, label_smoothing, ignore_index, class_weights, class_dim)
        targets = mask_labels(targets, mask, skip)
    total = cross_entropy_sum(logits, targets, label_smoothing, skip, class_weights, class_dim)
    if not hard:
        return LossTerm(total, logits.numel() // logits.shape[class_dim])
    if class_weights is not None:
        return LossTerm(total, label_weights(targets, class_weights, skip).sum())
    if mask is None and ignore_index is None:
        return LossTerm(total, targets.numel())
    return LossTerm(total, targets.ne(skip).sum())


def nll_term(
    log_probs: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORE_INDEX,
    class_weights: Tensor | None = None,
    class_dim: int = -1,
) -> LossTerm:
    """Return the sum of −log_probs at the labels, and how many labels count (with weights: their sum)."""
    check_shapes(log_probs, targets, class_dim)
    if log_probs.dtype is torch.bfloat16 or log_probs.dtype is torch.float16:
        log_probs = log_probs.float()
    targets = targets.long()
    if class_weights is not None:
        class_weights = class_weights.to(log_probs)
    try:
        total = F.nll_loss(
            log_probs.movedim(class_dim, min(1, log_probs.dim() - 1)),
            targets,
            class_weights,
            ignore_index=ignore_index,
            reduction="sum",
        )
    except IndexError as error:
        raise out_of_range(targets, log_probs.shape[class_dim], ignore_index) from error
    if class_weights is not None:
        return LossTerm(total, label_weights(targets, class_weights, ignore_index).sum())
    return LossTerm(total, targets.ne(ignore_index).sum())


def accuracy_term(
    logits: Tensor,
    targets: Tensor,
    count: Tensor | float,
    ignore_index: int | None = IGNORE_INDEX,
    class_dim: int = -1,
) -> LossTerm:
    """Return how many of `count` labels the largest logit names: a metric, without gradient.

    >>> accuracy_term(torch.eye(3), torch.tensor([0, 1, 0]), 3).sum
    tensor(2.)
    """
    logits = logits.detach()
    if targets.is_floating_point():
        targets = targets.argmax(class_dim)
    correct = logits.argmax(class_dim).eq(targets)
    if ignore_index is not None and ignore_index >= 0:  # a negative one is no class: no prediction equals it
        correct = correct & targets.ne(ignore_index)
    return LossTerm(correct.sum(dtype=torch.float64 if logits.dtype is torch.float64 else torch.float32), count, 0.0)


def mean_of(term: LossTerm) -> Tensor:
    """Return sum / count, and 0 where the count is 0.

    >>> mean_of(LossTerm(torch.tensor(0.0), torch.tensor(0)))
    tensor(0.)
    """
    if isinstance(term.count, Tensor):
        return term.sum / torch.where(term.count == 0, 1, term.count)
    return term.sum / (term.count or 1)


def mask_labels(targets: Tensor, mask: Tensor, ignore_index: int) -> Tensor:
    """Return the labels with `ignore_index` where `mask` is 0."""
    if mask.shape != targets.shape:
        raise TrainingError(
            f"a mask of shape {tuple(mask.shape)} does not fit labels of shape {tuple(targets.shape)}"
        )
    return targets.masked_fill(mask == 0, ignore_index)


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    class_weights: Tensor | None = None,
    class_dim: int = -1,
    reduction: Literal["sum", "none"] = "sum",
) -> Tensor:
    """Call torch's cross entropy once, in at least float32, and explain its errors.

    With the reduction "none" there is one value per element, in one dimension if the classes come last.
    """
    given = targets
    if logits.dtype is torch.bfloat16 or logits.dtype is torch.float16:
        logits = logits.float()
    if targets.dtype is not torch.int64:
        targets = targets.to(logits.dtype if targets.is_floating_point() else torch.int64)
    rows, labels = logits, targets
    if class_dim == -1 and logits.dim() > 2:
        check_shapes(logits, targets, class_dim)
        rows = logits.flatten(0, -2)
        labels = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    if class_weights is not None:
        class_weights = class_weights.to(logits)
    try:
        return F.cross_entropy(
            rows,
            labels,
            class_weights,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    except IndexError as error:
        raise out_of_range(targets, logits.shape[class_dim], ignore_index) from error
    except (RuntimeError, ValueError):
        check_shapes(logits, given, class_dim)
        if class_weights is not None and class_weights.shape != (logits.shape[class_dim],):
            raise TrainingError(
                f"there are {class_weights.numel()} class weights, "
                f"but the model's output has {logits.shape[class_dim]} classes"
            ) from None
        raise


def _weighted_term(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor,
    label_smoothing: float,
    ignore_index: int | None,
    class_weights: Tensor | None,
    class_dim: int,
) -> LossTerm:
    """Cross entropy where every element has its own weight: not one fused sum, but one value per element."""
    skip = NO_LABEL if ignore_index is None else ignore_index
    if targets.is_floating_point():
        shape = list(logits.shape)
        del shape[class_dim]
        if list(mask.shape) != shape:
            raise TrainingError(
                f"a mask of shape {tuple(mask.shape)} does not fit logits of shape {tuple(logits.shape)}"
            )
        counted = mask
    else:
        targets = mask_labels(targets, mask, skip)
        counted = mask * targets.ne(skip)
    losses = cross_entropy_sum(logits, targets, label_smoothing, skip, class_weights, class_dim, "none")
    losses = losses.view(mask.shape)
    # Not a plain product: where the mask is 0, a loss that is not finite must not become NaN.
    total = torch.where(mask == 0, 0.0, losses * mask).sum()
    if class_weights is not None and not targets.is_floating_point():
        counted = counted * label_weights(targets, class_weights, skip)
    return LossTerm(total, counted.sum())


def count_labels(targets: Tensor, ignore_index: int | None) -> Tensor | float:
    """Return how many labels are not `ignore_index`."""
    return targets.numel() if ignore_index is None else targets.ne(ignore_index).sum()


def label_weights(targets: Tensor, class_weights: Tensor, ignore_index: int | None) -> Tensor:
    """Return the weight of every label, 0 for those that are ignored."""
    ignored = targets == (NO_LABEL if ignore_index is None else ignore_index)
    weights = class_weights.to(targets.device)[targets.masked_fill(ignored, 0).long()]
    return weights.masked_fill(ignored, 0.0)


def out_of_range(targets: Tensor, num_classes: int, ignore_index: int | None) -> DataError:
    """Say which label lies outside the classes of the model."""
    labels = targets[targets != ignore_index] if ignore_index is not None else targets
    bad = labels[(labels < 0) | (labels >= num_classes)]
    found = f"found {bad[0].item()}, but " if bad.numel() else ""
    hint = ""
    if bad.numel() and bad[0] == IGNORE_INDEX:
        hint = f"; set ignore_index: {IGNORE_INDEX} to leave such elements out"
    return DataError(
        f"labels out of range: {found}the model's output has {num_classes} classes (0 … {num_classes - 1}){hint}"
    )


def check_shapes(logits: Tensor, targets: Tensor, class_dim: int) -> None:
    """Raise TrainingError if the labels are neither class indices nor probabilities for these logits."""
    if logits.dim() == 0:
        raise TrainingError("the model's output is a single number; cross entropy needs one value per class")
    found = tuple(targets.shape)
    indices = list(logits.shape)
    num_classes = indices.pop(class_dim)
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            raise TrainingError(
                f"floating labels of shape {found} do not fit the model's output of shape {tuple(logits.shape)}: "
                f"class probabilities have the same shape, class indices are integers of shape {tuple(indices)}"
            )
    elif list(found) != indices:
        hint = "; drop the last dimension with labels.squeeze(-1)" if list(found) == [*indices, 1] else ""
        if found == tuple(logits.shape) and num_classes > 1:
            hint = "; for class probabilities make them floating, for indices take labels.argmax"
        raise TrainingError(
            f"labels of shape {found} do not fit the model's output of shape {tuple(logits.shape)}: "
            f"expected {tuple(indices)}{hint}"
        )
