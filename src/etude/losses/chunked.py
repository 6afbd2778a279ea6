"""Cross entropy of a linear layer over chunks of rows: values and gradients in one pass, without all logits.

The loss is a sum, so its incoming gradient is one number. The gradients of hidden states and weights are known up to
that factor while a chunk's logits are in memory, so the logits need not be kept or recomputed.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from etude.losses.products import add_logit_gradients, chunk_rows_for, product

LOGITS_BYTES = {"cuda": 256 << 20}
"""Size of a chunk's logits, by device type. A GPU needs large products."""
DEFAULT_LOGITS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """A linear layer and the targets of its outputs. All products are computed in the dtype of `hidden`."""

    hidden: Tensor
    """(N, d)"""
    weight: Tensor
    """(V, d), of any dtype."""
    bias: Tensor | None
    """(V,)"""
    labels: Tensor
    """(N,) classes; any class where the row's weight is 0."""
    row_weights: Tensor
    """(N,) factor of every row's loss, in the dtype of the results: float32, or float64 if `hidden` is."""
    label_smoothing: float
    softcap: float | None
    want_hidden: bool
    want_weight: bool
    want_bias: bool
    chunk_rows: int | Literal["auto"]

    @property
    def want_gradients(self) -> bool:
        """Whether any gradient is needed."""
        return self.want_hidden or self.want_weight or self.want_bias


class LinearResult(NamedTuple):
    """Losses of the rows without their weights, and gradients of Σ row_weight · loss if needed."""

    losses: Tensor
    nlls: Tensor
    """The losses without label smoothing."""
    predicted: Tensor
    """Index of the largest logit of every row, -1 if one of them is NaN."""
    grad_hidden: Tensor | None
    """In the dtype of `hidden`."""
    grad_weight: Tensor | None
    """In the dtype of the results, like `grad_bias`."""
    grad_bias: Tensor | None


@torch.no_grad()
def chunked(problem: LinearProblem) -> LinearResult:
    """Solve the problem chunk by chunk; at most two chunks of logits are in memory."""
    hidden, weight, kind = problem.hidden, problem.weight.to(problem.hidden.dtype), problem.row_weights.dtype
    problem = replace(problem, weight=weight)
    (num_rows, width), num_classes = hidden.shape, weight.shape[0]
    budget = LOGITS_BYTES.get(hidden.device.type, DEFAULT_LOGITS_BYTES)
    auto = chunk_rows_for(num_rows, num_classes, budget // kind.itemsize)
    size = auto if problem.chunk_rows == "auto" else max(1, min(problem.chunk_rows, num_rows))
    result = LinearResult(
        losses=hidden.new_empty(num_rows, dtype=kind),
        nlls=hidden.new_empty(num_rows, dtype=kind),
        predicted=hidden.new_empty(num_rows, dtype=torch.int64),
        grad_hidden=torch.empty_like(hidden) if problem.want_hidden else None,
        grad_weight=hidden.new_zeros((num_classes, width), dtype=kind) if problem.want_weight else None,
        grad_bias=hidden.new_zeros(num_classes, dtype=kind) if problem.want_bias else None,
    )
    logits = hidden.new_empty((size, num_classes), dtype=kind)
    probs = torch.empty_like(logits)
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        length = rows.stop - start
        _forward(problem, result, rows, logits[:length], probs[:length])
        if problem.want_gradients:
            _backward(problem, result, rows, logits[:length], probs[:length])
    return result


def _forward(p: LinearProblem, result: LinearResult, rows: slice, logits: Tensor, probs: Tensor) -> None:
    """Compute the losses of a chunk; leave its logits and probabilities in the buffers."""
    product(p.hidden[rows], p.weight.t(), logits)
    if p.bias is not None:
        logits.add_(p.bias)
    if p.softcap is not None:
        logits.div_(p.softcap).tanh_().mul_(p.softcap)
    largest, predicted = logits.max(1, keepdim=True)
    torch.softmax(logits, 1, out=probs)
    # The largest probability is at least 1/V, so its logarithm is exact, which may not hold for that of the label.
    log_total = largest - probs.gather(1, predicted).log_()
    nlls = log_total - logits.gather(1, p.labels[rows, None])
    result.predicted[rows] = predicted.masked_fill_(largest.isnan(), -1)[:, 0]
    result.nlls[rows] = nlls[:, 0]
    if p.label_smoothing:
        uniform = log_total - logits.mean(1, keepdim=True)
        nlls = nlls.lerp_(uniform, p.label_smoothing)
    result.losses[rows] = nlls[:, 0]


def _backward(p: LinearProblem, result: LinearResult, rows: slice, logits: Tensor, probs: Tensor) -> None:
    """Turn a chunk's probabilities into gradients of its logits, and add these to the results."""
    labels = p.labels[rows, None]
    probs.scatter_(1, labels, probs.gather(1, labels).sub_(1.0 - p.label_smoothing))
    if p.label_smoothing:
        probs.sub_(p.label_smoothing / probs.shape[1])
    if p.softcap is not None:
        slopes = logits.div_(p.softcap).square_().neg_().add_(1.0)
        probs.mul_(slopes)
    add_logit_gradients(
        probs.mul_(p.row_weights[rows, None]),
        logits,
        p.hidden[rows],
        p.weight,
        None if result.grad_hidden is None else result.grad_hidden[rows],
        result.grad_weight,
        result.grad_bias,
    )
