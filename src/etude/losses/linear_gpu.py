"""Cross entropy of a linear layer on a GPU: products by cuBLAS, everything between them in one Triton kernel.

The logits of a chunk of rows are computed in the dtype of the products, and the kernel overwrites them with their
gradients. Importing this file requires triton.
"""

from dataclasses import replace

import torch
from torch import Tensor

from etude.losses import linear_triton
from etude.losses.chunked import LinearProblem, LinearResult
from etude.losses.products import ALIGNED, add_product, chunk_rows_for, product

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of hidden states that the kernel supports."""
LOGITS_BYTES = 300 << 20
"""Size of a chunk's logits, or of the weights if larger: every chunk is a pass over the weights' gradient."""
ROW_TILE = 128
"""Chunks have a multiple of this many rows: the tile height of the products."""
BLOCK_BYTES = 16 << 10
"""Logits of a row that are read at a time."""
NUM_WARPS = 16
VECTOR = 16
"""Rows whose length is a multiple of this are read in full vectors; others are padded."""
FLOAT16_LARGEST = 32768.0
"""In float16 the largest possible gradient of a logit is scaled to this, so that small ones do not underflow."""


class LaunchError(Exception):
    """The kernel could not be compiled or launched."""


@torch.no_grad()
def fused(problem: LinearProblem) -> LinearResult:
    """Solve the problem with one chunk of logits in memory. Raises LaunchError if there is no kernel."""
    # Triton launches kernels on the current device.
    with torch.cuda.device_of(problem.hidden):
        return _solve(_contiguous(problem))


def _contiguous(problem: LinearProblem) -> LinearProblem:
    """Return the problem with all kernel inputs contiguous."""
    return replace(
        problem,
        hidden=problem.hidden.contiguous(),
        labels=problem.labels.contiguous(),
        row_weights=problem.row_weights.contiguous(),
        bias=None if problem.bias is None else problem.bias.contiguous(),
    )


def _solve(problem: LinearProblem) -> LinearResult:
    hidden, kind = problem.hidden, problem.row_weights.dtype
    (num_rows, width), num_classes = hidden.shape, problem.weight.shape[0]
    # A label out of range is an error on the device, as it is in torch's own cross entropy.
    problem.weight[:, 0].gather(0, problem.labels)
    weight = _aligned(problem.weight, hidden.dtype)
    scales, undo = _row_scales(problem)
    result = LinearResult(
        losses=torch.empty_like(problem.row_weights),
        nlls=torch.empty_like(problem.row_weights),
        predicted=torch.empty_like(problem.labels),
        grad_hidden=torch.empty_like(hidden) if problem.want_hidden else None,
        grad_weight=hidden.new_empty(weight.shape, dtype=kind) if problem.want_weight else None,
        grad_bias=hidden.new_zeros(len(weight), dtype=kind) if problem.want_bias else None,
    )
    size = _chunk_rows(problem, len(weight))
    logits = hidden.new_empty((size, len(weight)))
    counted = hidden.new_empty((size if problem.want_weight else 0, width))
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        chunk = logits[: rows.stop - start]
        torch.mm(hidden[rows], weight.t(), out=chunk)
        if len(weight) > num_classes:
            chunk[:, num_classes:].fill_(float("-inf"))
        _launch(problem, hidden[rows], chunk, counted, scales[rows], rows, result)
        _add_gradients(chunk, counted[: len(chunk)], weight, undo, rows, result)
    if undo is not None:
        for total in (result.grad_weight, result.grad_bias):
            if total is not None:
                total.mul_(undo)
    if len(weight) == num_classes:
        return result
    return result._replace(
        grad_weight=None if result.grad_weight is None else result.grad_weight[:num_classes],
        grad_bias=None if result.grad_bias is None else result.grad_bias[:num_classes],
    )


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights in a dtype, padded with zero classes if cuBLAS would be several times slower otherwise."""
    num_classes = len(weight)
    if num_classes % VECTOR == 0:
        return weight.to(dtype)
    aligned = weight.new_empty((-(-num_classes // ALIGNED) * ALIGNED, weight.shape[1]), dtype=dtype)
    aligned[:num_classes] = weight
    aligned[num_classes:] = 0.0
    return aligned


def _row_scales(problem: LinearProblem) -> tuple[Tensor, Tensor | None]:
    """Return the factor of the gradients of the rows' losses, and its inverse: in float16 they are scaled.

    No gradient of a logit is larger than the weight of its row, so the largest weight determines the factor.
    """
    scales = problem.row_weights
    if problem.hidden.dtype is not torch.float16:
        return scales, None
    undo = scales.abs().amax().div_(FLOAT16_LARGEST).clamp_min_(torch.finfo(scales.dtype).tiny)
    return scales / undo, undo


def _chunk_rows(problem: LinearProblem, num_columns: int) -> int:
    """Return the number of rows of logits per chunk."""
    num_rows, width = problem.hidden.shape
    if problem.chunk_rows != "auto":
        return max(1, min(problem.chunk_rows, num_rows))
    most_logits = max(LOGITS_BYTES // problem.hidden.dtype.itemsize, num_columns * width)
    most = max(ROW_TILE, most_logits // num_columns // ROW_TILE * ROW_TILE)
    even = chunk_rows_for(num_rows, num_columns, most_logits)
    return min(-(-even // ROW_TILE) * ROW_TILE, most, num_rows)


def _add_gradients(
    grads: Tensor, hidden: Tensor, weight: Tensor, undo: Tensor | None, rows: slice, result: LinearResult
) -> None:
    """Backpropagate a chunk's logit gradients to its hidden states (written), weights and bias (accumulated)."""
    if result.grad_weight is not None:
        add = product if rows.start == 0 else add_product
        add(grads.t(), hidden, result.grad_weight)
    if result.grad_bias is not None:
        result.grad_bias.add_(grads.sum(0, dtype=result.grad_bias.dtype))
    if result.grad_hidden is None:
        return
    if undo is None:
        torch.mm(grads, weight, out=result.grad_hidden[rows])
    else:
        found = product(grads, weight, weight.new_empty((len(grads), weight.shape[1]), dtype=torch.float32))
        result.grad_hidden[rows] = found.mul_(undo)


def _launch(
    problem: LinearProblem,
    hidden: Tensor,
    logits: Tensor,
    counted: Tensor,
    scales: Tensor,
    rows: slice,
    result: LinearResult,
) -> None:
    """Run the kernel on the logits of a chunk."""
    stride, group = logits.shape[1], 16 // logits.element_size()
    block = max(32 * group, min(BLOCK_BYTES // logits.element_size(), 1 << (stride - 1).bit_length()))
    try:
        linear_triton.cross_entropy_rows[(len(logits),)](
            logits,
            logits if problem.bias is None else problem.bias,
            hidden,
            counted,
            problem.labels[rows],
            scales,
            result.losses[rows],
            result.nlls[rows],
            result.predicted[rows],
            problem.weight.shape[0],
            stride,
            hidden.shape[1],
            problem.label_smoothing,
            0.0 if problem.softcap is None else problem.softcap,
            HAS_BIAS=problem.bias is not None,
            HAS_SOFTCAP=problem.softcap is not None,
            SMOOTHED=problem.label_smoothing > 0,
            GRADIENTS=problem.want_gradients,
            COPY=problem.want_weight,
            BLOCK=block,
            GROUP=group,
            num_warps=max(1, min(NUM_WARPS, block // (32 * group))),
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler or driver may raise anything
        raise LaunchError(str(error)) from error
