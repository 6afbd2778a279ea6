"""A fused linear layer and cross entropy: the logits of all positions are never in memory together.

For 32,000 tokens and a vocabulary of 50,000 the logits alone take 6.5 GB in float32, and the plain formula needs
three tensors of that size. Here they are computed for one chunk of positions at a time, together with the gradients.
"""

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec

import torch
from torch import Tensor

from etude.core.errors import TrainingError
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX, NO_LABEL, mask_labels
from etude.losses.linear_autograd import loss_sums

P = ParamSpec("P")


def linear_cross_entropy_terms(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = IGNORE_INDEX,
    softcap: float | None = None,
    chunk_tokens: int | Literal["auto"] = "auto",
    metrics: bool = False,
) -> Terms:
    """Return cross_entropy(hidden @ weight.T + bias, targets) as "loss": the sum and the number of counted labels.

    With `metrics` also "accuracy", and with label smoothing "nll", the loss without it; they come from the same pass.

    `hidden` is (…, d), `weight` (V, d), `targets` (…) class indices; `mask` is shaped like the targets: elements
    where it is 0 do not count, and a floating-point mask weights the others. With `softcap` the logits are softcap ·
    tanh(logits / softcap). Products are computed in the dtype of `hidden`, or of autocast; everything else in at
    least float32. `chunk_tokens` is the number of positions per chunk; by default a few dozen megabytes of logits.
    Gradients are computed with the values, so there is no second derivative. Raises TrainingError for shapes or
    dtypes that do not fit, and on the CPU DataError for labels out of range.

    >>> hidden, weight = torch.zeros(2, 3, 8), torch.zeros(5, 8)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([[0, 4, -100], [1, 2, -100]]))
    LossTerm(sum=tensor(6.4378), count=tensor(4), weight=1.0)
    """
    _check(hidden, weight, targets, bias)
    skip = NO_LABEL if ignore_index is None else ignore_index
    weighs = mask is not None and mask.is_floating_point()
    labels = targets.long() if mask is None else mask_labels(targets, mask, skip)
    counted = labels.ne(skip)
    kind = result_type(hidden)
    row_weights = counted.to(kind) * mask.to(kind) if weighs and mask is not None else counted.to(kind)
    if ignore_index is None and mask is None:
        count: Tensor | float = labels.numel()
    else:
        count = row_weights.sum() if weighs else counted.sum()
    total, nll, correct = loss_sums(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.masked_fill(~counted, 0).flatten(),
        row_weights.flatten(),
        label_smoothing,
        softcap,
        chunk_tokens,
        product_type(hidden),
    )
    terms = {"loss": LossTerm(total, count)}
    if metrics:
        terms["accuracy"] = LossTerm(correct, count, 0.0)
        if label_smoothing:
            terms["nll"] = LossTerm(nll, count, 0.0)
    return terms


def _loss_of(terms: Callable[P, Terms]) -> Callable[P, LossTerm]:
    """Return a function with the same arguments that returns only the loss."""

    def loss(*args: P.args, **kwargs: P.kwargs) -> LossTerm:
        return terms(*args, **kwargs)["loss"]

    functools.update_wrapper(loss, terms)
    loss.__name__ = loss.__qualname__ = terms.__name__.removesuffix("_terms")
    loss.__doc__ = f"Return only the loss; arguments as for `{terms.__name__}`."
    return loss


linear_cross_entropy = _loss_of(linear_cross_entropy_terms)


def product_type(hidden: Tensor) -> torch.dtype:
    """Return the dtype of products: that of autocast, or of `hidden`."""
    kind, device = hidden.dtype, hidden.device.type
    if kind is not torch.float64 and torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    # Other devices have no float16 products with float32 accumulation.
    return torch.float32 if kind is torch.float16 and device != "cuda" else kind


def result_type(hidden: Tensor) -> torch.dtype:
    """Return the dtype of everything but products: float32, or float64 for float64 hidden states."""
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Raise TrainingError if shapes or dtypes do not fit."""
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise TrainingError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit weights of shape {tuple(weight.shape)}: "
            f"expected (…, d) and (classes, d)"
        )
    if targets.is_floating_point() or targets.shape != hidden.shape[:-1]:
        raise TrainingError(
            f"labels {targets.dtype} of shape {tuple(targets.shape)} do not fit hidden states of shape "
            f"{tuple(hidden.shape)}: expected integers of shape {tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise TrainingError(f"a bias of shape {tuple(bias.shape)} does not fit {weight.shape[0]} classes")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TrainingError(
            f"hidden states are {hidden.dtype}, weights {weight.dtype}: convert one of them, or use autocast"
        )
