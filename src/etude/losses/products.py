"""Chunked products of large matrices: rows per chunk, and float32 sums of half-precision products."""

import torch
from torch import Tensor

FEWEST_ROWS = 64
"""Below this many rows, adding to the weights' gradient costs more than the products."""
FLOAT16_LARGEST = 1024.0
"""Gradients of logits are scaled to this size in float16, so that small ones do not underflow and large ones fit."""
ALIGNED = 64
"""Rows of half-precision gradients start at multiples of this many elements."""
WEIGHT_BLOCK = 8192
"""Rows of the weights' gradient that are computed at a time if a product cannot add to float32."""


def chunk_rows_for(num_rows: int, num_classes: int, most_logits: int) -> int:
    """Return the rows of logits per chunk: chunks of equal size, with about `most_logits` at most.

    >>> chunk_rows_for(8192, 50_257, 2**24), chunk_rows_for(10, 7, 2**24)
    (328, 10)
    """
    most = max(FEWEST_ROWS, most_logits // max(1, num_classes))
    num_chunks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_chunks))


def add_logit_gradients(
    logit_grads: Tensor,
    spare: Tensor,
    hidden: Tensor,
    weight: Tensor,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Backpropagate a chunk's logit gradients to its hidden states (written), weights and bias (accumulated).

    `logit_grads` are in the dtype of the results; products are computed in the dtype of `hidden`. `spare`, a matrix
    of the size and dtype of `logit_grads`, is overwritten if the two differ.
    """
    kind, undo = logit_grads.dtype, None
    if grad_bias is not None:
        grad_bias.add_(logit_grads.sum(0, dtype=grad_bias.dtype))
    grads = logit_grads
    if hidden.dtype != kind:
        grads = _narrow(spare, hidden.dtype)
        if hidden.dtype is torch.float16:
            undo = logit_grads.abs().amax().div_(FLOAT16_LARGEST).clamp_min_(torch.finfo(kind).tiny)
            torch.div(logit_grads, undo, out=grads)
        else:
            grads.copy_(logit_grads)
    if grad_weight is not None:
        add_product(grads.t(), hidden, grad_weight, undo)
    if grad_hidden is not None:
        if grads.dtype == grad_hidden.dtype == kind:
            torch.mm(grads, weight, out=grad_hidden)
        else:
            found = product(grads, weight, hidden.new_empty(hidden.shape, dtype=kind))
            grad_hidden.copy_(found if undo is None else found.mul_(undo))


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Compute a @ b into `out`, of the same or a wider dtype."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def add_product(a: Tensor, b: Tensor, total: Tensor, factor: Tensor | None = None) -> None:
    """Add factor · a @ b to `total`, of the same or a wider dtype."""
    if factor is not None:
        for part, rows in zip(torch.split(total, WEIGHT_BLOCK), torch.split(a, WEIGHT_BLOCK), strict=True):
            part.addcmul_(product(rows, b, torch.empty_like(part)), factor)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        for part, rows in zip(torch.split(total, WEIGHT_BLOCK), torch.split(a, WEIGHT_BLOCK), strict=True):
            part.add_(rows @ b)


def _narrow(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix of a half as wide dtype in the memory of logits that are no longer needed.

    Its rows are aligned if there is space: otherwise products with an odd number of classes are slow on GPUs.
    """
    num_rows, num_classes = logits.shape
    stride = min(-(-num_classes // ALIGNED) * ALIGNED, 2 * num_classes)
    return torch.as_strided(logits.view(dtype), (num_rows, num_classes), (stride, 1))
