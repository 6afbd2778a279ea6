"""Autograd function of a fused linear layer and cross entropy, using the kernel of the device.

The gradients are computed together with the values and saved. The backward pass multiplies them by one number.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, library

from etude.core.errors import DataError, TrainingError
from etude.losses.chunked import LinearProblem, LinearResult, chunked

LinearKernel = Callable[[LinearProblem], LinearResult]
Sums = tuple[Tensor, Tensor, Tensor]


def _with_triton(problem: LinearProblem) -> LinearResult:
    """Solve the problem with the Triton kernel, or with `chunked` if it is unavailable."""
    try:
        from etude.losses import linear_gpu
    except ImportError:
        KERNELS["cuda"] = chunked
        return chunked(problem)
    if problem.hidden.dtype not in linear_gpu.TYPES or not problem.hidden.numel():
        return chunked(problem)
    try:
        return linear_gpu.fused(problem)
    except linear_gpu.LaunchError as error:
        KERNELS["cuda"] = chunked
        warnings.warn(
            f"the Triton kernel of linear_cross_entropy cannot be used ({error}); without it the loss takes about "
            f"twice as long",
            RuntimeWarning,
            stacklevel=2,
        )
    return chunked(problem)


KERNELS: dict[str, LinearKernel] = {"cuda": _with_triton}
"""Kernels by device type that replace `chunked`."""

DROP_BELOW = 0.9
"""On the CPU, rows that do not count are dropped if at most this share of the rows counts."""


def loss_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_weights: Tensor,
    label_smoothing: float,
    softcap: float | None,
    chunk_rows: int | Literal["auto"],
    product_type: torch.dtype,
) -> Sums:
    """Return Σ row_weight · loss (differentiable once), the same without smoothing, and the correct predictions.

    The arguments are those of a `LinearProblem`. Products are computed in the dtype `product_type`. Raises DataError
    on the CPU for labels out of range.
    """
    grads = torch.is_grad_enabled()
    wants = [grads and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    options = (labels, row_weights, label_smoothing, softcap)
    # one custom operator, so that chunks are not unrolled; calling it costs 60 µs more
    if torch.compiler.is_compiling():
        rows = 0 if chunk_rows == "auto" else chunk_rows
        total, nll, correct = _operator(hidden, weight, bias, *options, wants, rows, product_type)[:3]
        return total, nll.detach(), correct.detach()
    problem = LinearProblem(hidden, weight, bias, *options, wants[0], wants[1], wants[2], chunk_rows)
    found: Sums = _LinearCrossEntropy.apply(hidden, weight, bias, problem, product_type)  # type: ignore[no-untyped-call]
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums of losses, of losses without smoothing and of correct predictions; only the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: LinearProblem,
        product_type: torch.dtype,
    ) -> Sums:
        (total, nll, correct), result = _solve(problem, product_type)
        ctx.save_for_backward(result.grad_hidden, result.grad_weight, result.grad_bias)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(nll, correct)
        return total, nll, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "linear_cross_entropy has no second derivative: use cross_entropy(linear(hidden, weight), targets) "
                "where create_graph=True is needed"
            )
        # Scale the saved gradients in place, unless the graph is kept: then they must not change.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        found: list[Tensor | None] = []
        for saved, kind in zip(ctx.saved_tensors, ctx.types, strict=True):
            scaled = None if saved is None else saved.mul(grad) if keep else saved.mul_(grad)
            found.append(None if scaled is None else scaled.to(kind))
        return (*found, None, None)


@library.custom_op("etude::linear_cross_entropy", mutates_args=())
def _operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_weights: Tensor,
    label_smoothing: float,
    softcap: float | None,
    wants: list[bool],
    chunk_rows: int,
    product_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the three sums, and the gradients of the first; empty if not needed."""
    options = (labels, row_weights, label_smoothing, softcap)
    problem = LinearProblem(hidden, weight, bias, *options, wants[0], wants[1], wants[2], chunk_rows or "auto")
    sums, result = _solve(problem, product_type)
    first, second, third = (
        row_weights.new_empty(0) if one is None else one.contiguous()
        for one in (result.grad_hidden, result.grad_weight, result.grad_bias)
    )
    return *sums, first, second, third


@_operator.register_fake
def _shapes(*given: Any) -> tuple[Tensor, ...]:
    hidden, weight, bias, _, row_weights, _, _, wants, _, product_type = given
    sums = [row_weights.new_empty(()) for _ in range(3)]
    kinds = (product_type, row_weights.dtype, row_weights.dtype)
    grads = [
        row_weights.new_empty(one.shape, dtype=kind) if wanted and one is not None else row_weights.new_empty(0)
        for one, kind, wanted in zip((hidden, weight, bias), kinds, wants, strict=True)
    ]
    return *sums, *grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[3:])
    ctx.types = [one.dtype if wanted else None for one, wanted in zip(inputs[:3], inputs[7], strict=True)]


def _multiply(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = zip(ctx.saved_tensors, ctx.types, strict=True)
    return (*(None if kind is None else (saved * grad).to(kind) for saved, kind in grads), *[None] * 7)


_operator.register_autograd(_multiply, setup_context=_keep)


def _solve(problem: LinearProblem, product_type: torch.dtype) -> tuple[Sums, LinearResult]:
    """Run the kernel, and sum its results."""
    labels, row_weights = problem.labels, problem.row_weights
    with torch.autocast(problem.hidden.device.type, enabled=False):
        try:
            result = _run(problem, product_type)
        except RuntimeError as error:
            _explain(error, labels, problem.weight.shape[0])
            raise
        counts = row_weights != 0
        total, nll = (
            torch.where(counts, values, 0.0).mul_(row_weights).sum() for values in (result.losses, result.nlls)
        )
        correct = (row_weights * result.predicted.eq(labels)).sum()
    return (total, nll, correct), result


def _run(problem: LinearProblem, product_type: torch.dtype) -> LinearResult:
    """Convert hidden states and bias, drop uncounted rows if that is cheap, and run the kernel."""
    kernel = KERNELS.get(problem.hidden.device.type, chunked)
    hidden, bias = problem.hidden.detach(), problem.bias
    problem = replace(
        problem,
        weight=problem.weight.detach(),
        bias=None if bias is None else bias.detach().to(problem.row_weights.dtype),
    )
    if hidden.is_cpu:  # on other devices the number of rows would synchronise
        rows = problem.row_weights.nonzero().squeeze(1)
        if len(rows) <= DROP_BELOW * len(hidden):
            part = replace(
                problem,
                hidden=hidden[rows].to(product_type),
                labels=problem.labels[rows],
                row_weights=problem.row_weights[rows],
            )
            return _put_back(kernel(part), rows, len(hidden))
    return kernel(replace(problem, hidden=hidden.to(product_type)))


def _put_back(part: LinearResult, rows: Tensor, num_rows: int) -> LinearResult:
    """Expand the result of some rows to all rows; the others are 0."""

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, rows, values)

    return part._replace(
        losses=spread(part.losses),
        nlls=spread(part.nlls),
        predicted=spread(part.predicted),
        grad_hidden=None if part.grad_hidden is None else spread(part.grad_hidden),
    )


def _explain(error: Exception, labels: Tensor, num_classes: int) -> None:
    """Raise DataError instead of torch's error if a label is out of range."""
    if not labels.is_cpu:
        return  # after an error inside a kernel, nothing can be read from the device
    bad = labels[(labels < 0) | (labels >= num_classes)]
    if len(bad):
        raise DataError(
            f"labels out of range: found {int(bad[0])}, but there are {num_classes} classes (0 … {num_classes - 1})"
        ) from error
