"""Expected values from hidden states: logits of a modality, softmax, expectation and loss, chunk by chunk.

Only the modality's rows of the output layer are used, and only one chunk of their logits is in memory. The loss is a
sum, so gradients are known up to one factor while a chunk is in memory, and nothing is recomputed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from etude.core.errors import TrainingError
from etude.core.model import HeadOutput
from etude.losses.linear import product_type, result_type
from etude.losses.products import add_logit_gradients, chunk_rows_for, product
from etude.multimodal.loss.reconstruction import Reconstruction

CHUNK_BYTES = {"cuda": 32 << 20}
"""Size of a chunk's logits, by device type."""
DEFAULT_CHUNK_BYTES = 8 << 20
"""On a CPU the working set should fit its cache; smaller chunks make products slower than that saves."""


@dataclass(frozen=True, slots=True)
class LossPart:
    """The positions of one modality: rows of the hidden states, and their target tokens."""

    reconstruction: Reconstruction
    slice: slice
    """The rows of the output layer that belong to the modality."""
    rows: Tensor | None
    """(n,) distinct row indices; None if they are all rows in order."""
    targets: Tensor
    """(n,) target tokens, relative to the start of the slice; any value where the weight is 0."""
    row_weights: Tensor
    """(n,) factor of every position's loss."""


@dataclass(frozen=True, slots=True)
class ExpectationProblem:
    """The input of a kernel: products are in the dtype of `hidden`, everything else in that of `row_weights`."""

    hidden: Tensor
    """(n, d)"""
    weight: Tensor
    """(V, d), of only this modality's tokens."""
    bias: Tensor | None
    """(V,)"""
    softcap: float | None
    targets: Tensor
    row_weights: Tensor
    reconstruction: Reconstruction
    want_hidden: bool
    want_weight: bool
    want_bias: bool
    chunk_rows: int | Literal["auto"]


class ExpectationResult(NamedTuple):
    """Losses and squared errors (n,) without the row weights, and gradients of Σ row_weight · loss."""

    losses: Tensor
    squared_errors: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


ExpectationKernel = Callable[[ExpectationProblem], ExpectationResult]


def _on_cuda(problem: ExpectationProblem) -> ExpectationResult:
    from etude.multimodal.loss.gpu import expectation  # not imported on a machine without a GPU

    return expectation(problem)


KERNELS: dict[str, ExpectationKernel] = {"cuda": _on_cuda}
"""Kernels by device type that replace `chunked_expectation`."""


def expected_value_sums(
    head: HeadOutput, parts: Sequence[LossPart], chunk_rows: int | Literal["auto"] = "auto"
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for every part the sum of its losses (differentiable once) and of its squared errors."""
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
    grads = torch.is_grad_enabled()  # an autograd Function computes gradients even if they are unused
    # Opaque to torch.compile, which would unroll the chunks.
    apply = _uncompiled if torch.compiler.is_compiling() else _apply
    found = apply(hidden, head.weight, head.bias, head.softcap, tuple(parts), chunk_rows, grads)
    return list(found[: len(parts)]), list(found[len(parts) :])


class _ExpectedValues(torch.autograd.Function):
    """Sums of losses and of squared errors of all parts; the latter have no gradient.

    Parts have different rows of the output layer, so their gradients are adjacent and are scaled one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        parts: tuple[LossPart, ...],
        chunk_rows: int | Literal["auto"],
        grads: bool,
    ) -> Any:
        wants = [grads and needed for needed in ctx.needs_input_grad[:3]]
        kernel = KERNELS.get(hidden.device.type, chunked_expectation)
        products, results = product_type(hidden), result_type(hidden)
        losses: list[Tensor] = []
        squares: list[Tensor] = []
        gradients: list[Tensor | None] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for part in parts:
                chosen = hidden.detach() if part.rows is None else hidden.detach()[part.rows]
                problem = ExpectationProblem(
                    hidden=chosen.to(products),
                    weight=weight.detach()[part.slice].to(products),
                    bias=None if bias is None else bias.detach()[part.slice].to(results),
                    softcap=softcap,
                    targets=part.targets,
                    row_weights=part.row_weights.to(results),
                    reconstruction=part.reconstruction.on(hidden.device, results),
                    want_hidden=wants[0],
                    want_weight=wants[1],
                    want_bias=wants[2],
                    chunk_rows=chunk_rows,
                )
                result = kernel(problem)
                counts = part.row_weights != 0
                for values, sums in ((result.losses, losses), (result.squared_errors, squares)):
                    sums.append(torch.where(counts, values, 0.0).mul_(part.row_weights).sum())
                gradients += [result.grad_hidden, result.grad_weight, result.grad_bias]
        ctx.save_for_backward(*gradients, *(part.rows for part in parts))
        ctx.slices = [part.slice for part in parts]
        ctx.shapes = [None if one is None else (one.shape, one.dtype) for one in (hidden, weight, bias)]
        ctx.mark_non_differentiable(*squares)
        return (*losses, *squares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "the expected-value loss of hidden states has no second derivative: pass logits if "
                "create_graph=True is needed"
            )
        slices, saved = ctx.slices, ctx.saved_tensors
        rows = saved[3 * len(slices) :]
        # Scale the saved gradients in place, unless the graph is kept: then they must not change.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

        def scaled(which: int) -> list[Tensor]:
            parts = saved[which : 3 * len(slices) : 3]
            return [part.mul(grad) if keep else part.mul_(grad) for part, grad in zip(parts, grads, strict=False)]

        wants = ctx.needs_input_grad
        return (
            _joined(scaled(0), rows, *ctx.shapes[0]) if wants[0] else None,
            _joined(scaled(1), slices, *ctx.shapes[1]) if wants[1] else None,
            _joined(scaled(2), slices, *ctx.shapes[2]) if wants[2] else None,
            *[None] * 4,
        )


def _joined(
    parts: Sequence[Tensor], places: Sequence[Tensor | slice | None], shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of all rows from those at the places of the parts, None for all; 0 for other rows."""
    if len(parts) == 1 and parts[0].shape == shape and not isinstance(places[0], Tensor):
        return parts[0].to(dtype)
    total = parts[0].new_zeros(shape, dtype=dtype)
    for part, place in zip(parts, places, strict=True):
        if isinstance(place, Tensor):
            total.index_add_(0, place, part.to(dtype))
        else:
            total[place or slice(None)].add_(part)
    return total


def _apply(*arguments: Any) -> tuple[Tensor, ...]:
    return _ExpectedValues.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]


_uncompiled = torch._disable_dynamo(_apply)  # type: ignore[attr-defined]


def empty_result(p: ExpectationProblem) -> ExpectationResult:
    """Return memory for a result: accumulated gradients start at 0."""
    hidden, kind = p.hidden, p.row_weights.dtype
    num_rows, num_codes = hidden.shape[0], p.weight.shape[0]
    # Float16 gradients could underflow or overflow before the incoming gradient is known.
    hidden_kind = kind if hidden.dtype is torch.float16 else hidden.dtype
    return ExpectationResult(
        losses=hidden.new_empty(num_rows, dtype=kind),
        squared_errors=hidden.new_empty(num_rows, dtype=kind),
        grad_hidden=hidden.new_empty(hidden.shape, dtype=hidden_kind) if p.want_hidden else None,
        grad_weight=hidden.new_zeros(p.weight.shape, dtype=kind) if p.want_weight else None,
        grad_bias=hidden.new_zeros(num_codes, dtype=kind) if p.want_bias else None,
    )


@torch.no_grad()
def chunked_expectation(problem: ExpectationProblem) -> ExpectationResult:
    """Solve the problem chunk by chunk."""
    p, hidden, kind = problem, problem.hidden, problem.row_weights.dtype
    num_rows, num_codes = hidden.shape[0], p.weight.shape[0]
    result = empty_result(p)
    gradients = p.want_hidden or p.want_weight or p.want_bias
    budget = CHUNK_BYTES.get(hidden.device.type, DEFAULT_CHUNK_BYTES)
    size = chunk_rows_for(num_rows, num_codes, budget // kind.itemsize)
    if p.chunk_rows != "auto":
        size = max(1, min(p.chunk_rows, num_rows))
    logits = hidden.new_empty((size, num_codes), dtype=kind)
    probs = torch.empty_like(logits)
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        _chunk(p, result, rows, logits[: rows.stop - start], probs[: rows.stop - start], gradients=gradients)
    return result


def _chunk(
    p: ExpectationProblem, result: ExpectationResult, rows: slice, logits: Tensor, probs: Tensor, *, gradients: bool
) -> None:
    product(p.hidden[rows], p.weight.t(), logits)
    if p.bias is not None:
        logits.add_(p.bias)
    slopes = None
    if p.softcap is not None:
        logits.div_(p.softcap).tanh_()
        slopes = 1.0 - logits.square() if gradients else None
        logits.mul_(p.softcap)
    torch.softmax(logits, 1, out=probs)
    found = p.reconstruction.chunk_loss(logits, probs, p.targets[rows], p.row_weights[rows] if gradients else None)
    result.losses[rows], result.squared_errors[rows] = found
    if gradients:
        add_logit_gradients(
            logits if slopes is None else logits.mul_(slopes),
            probs,
            p.hidden[rows],
            p.weight,
            None if result.grad_hidden is None else result.grad_hidden[rows],
            result.grad_weight,
            result.grad_bias,
        )
