"""Interpreting predictions and targets: the class dimension, masks, and predicted classes.

Nothing here synchronises with the device.
"""

import math

import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError


def predicted_classes(
    predictions: Tensor, targets: Tensor, num_classes: int, class_dim: int | None, who: str
) -> tuple[Tensor, Tensor]:
    """Return class ids shaped like the targets, given or from the largest logits, and where they are NaN."""
    if predictions.shape != targets.shape:
        dim = class_dim_of(predictions, targets, class_dim, who)
        if predictions.shape[dim] != num_classes:
            raise DataError(
                f"{who}: predictions {form_of(predictions)} have {predictions.shape[dim]} classes, but num_classes is "
                f"{num_classes}; make them equal"
            )
        largest, classes = predictions.max(dim)
        return classes, largest.isnan()
    if predictions.is_floating_point():
        raise DataError(
            f"{who}: predictions {form_of(predictions)} have the shape of the targets, which fits class ids "
            "(integers) only; pass class ids, or logits with one more dimension"
        )
    return predictions, torch.zeros_like(targets, dtype=torch.bool)


def binary_scores(predictions: Tensor, targets: Tensor, who: str) -> Tensor:
    """Return binary predictions shaped like the targets: logits, or ids as they are.

    Floating-point predictions are logits: one per label, with or without a last dimension of 1, or those of the
    classes 0 and 1 in a last dimension of 2, whose difference is the logit.
    """
    if predictions.shape == targets.shape:
        return predictions
    if not predictions.is_floating_point() or predictions.shape not in ((*targets.shape, 1), (*targets.shape, 2)):
        raise DataError(
            f"{who}: predictions {form_of(predictions)} do not fit targets {form_of(targets)}; set num_classes for "
            f"classes or num_labels for labels; binary predictions have the shape of the targets, or are logits "
            f"with a last dimension of 1 or 2"
        )
    if predictions.shape[-1] == 1:
        return predictions[..., 0]
    wide = (
        predictions if predictions.dtype is torch.float64 else predictions.float()
    )  # half would round the difference
    return wide[..., 1] - wide[..., 0]


def predicted_positives(predictions: Tensor, targets: Tensor, threshold: float, who: str) -> tuple[Tensor, Tensor]:
    """Return which binary labels are predicted to be positive and which negative, shaped like the targets.

    Integers and bools are used directly. NaN is neither.

    >>> predicted_positives(torch.tensor([-1.0, 2.0, math.nan]), torch.tensor([0, 1, 1]), 0.5, "F1")
    (tensor([False,  True, False]), tensor([ True, False, False]))
    """
    scores = binary_scores(predictions, targets, who)
    if scores.is_floating_point():
        limit = math.log(threshold / (1 - threshold))
        return scores > limit, scores <= limit
    return scores != 0, scores == 0


def inferred_classes(predictions: Tensor, targets: Tensor, class_dim: int | None, who: str) -> int | None:
    """Return the number of classes of logits with class ids as targets; None if they are binary, or do not fit."""
    if targets.is_floating_point() or predictions.dim() != targets.dim() + 1:
        return None
    if predictions.shape[-1] <= 2 and predictions.shape[:-1] == targets.shape:
        return None
    return predictions.shape[class_dim_of(predictions, targets, class_dim, who)]


def counted_labels(targets: Tensor, mask: Tensor | None, ignore_index: int | None, who: str) -> Tensor:
    """Return which binary labels count: not masked, not `ignore_index`, not NaN. A mask may be per sample."""
    if mask is not None and mask.shape == targets.shape[:-1] != targets.shape:
        mask = mask.unsqueeze(-1).expand(targets.shape)
    counted = counted_elements(targets, mask, None if targets.dtype is torch.bool else ignore_index, who)
    return counted & ~targets.isnan() if targets.is_floating_point() else counted


def class_dim_of(logits: Tensor, targets: Tensor, class_dim: int | None, who: str) -> int:
    """Return the dimension of the logits that the targets lack: the given one, else the last or the second."""
    shape, rest = tuple(logits.shape), tuple(targets.shape)
    if class_dim is None:
        candidates = sorted({1, len(shape) - 1})
    else:
        candidates = [class_dim + len(shape) if class_dim < 0 else class_dim]
    fitting = [dim for dim in candidates if 0 <= dim < len(shape) and shape[:dim] + shape[dim + 1 :] == rest]
    if not fitting:
        place = "the last or the second" if class_dim is None else f"number {class_dim}"
        raise DataError(
            f"{who}: predictions {form_of(logits)} do not fit targets {form_of(targets)}; they need the same shape "
            f"(class ids), or one more dimension for the classes, {place}"
        )
    if len(fitting) > 1:
        raise ConfigError(
            f"{who}: the classes of predictions {shape} may be dimension 1 or {fitting[1]}; set class_dim"
        )
    return fitting[0]


def counted_elements(targets: Tensor, mask: Tensor | None, ignore_index: int | None, who: str) -> Tensor:
    """Return which elements count."""
    if mask is not None and mask.shape != targets.shape:
        raise DataError(f"{who}: the mask {form_of(mask)} must have the shape of the targets {form_of(targets)}")
    counted = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
    return counted if mask is None else counted & (mask != 0)


def form_of(tensor: Tensor) -> str:
    """Return shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
