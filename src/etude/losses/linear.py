"""A linear layer and its cross entropy in one: the logits of all positions are never held together.

For 32,000 tokens and a vocabulary of 50,000 the logits alone take 6.5 GB in float32, and the plain formula holds
three tensors of that size. Here they are computed a chunk of positions at a time, together with the gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from etude.core.errors import DataError, TrainingError
from etude.core.task import LossTerm, Terms
from etude.losses.chunked import LinearProblem, LinearResult, chunked
from etude.losses.functional import IGNORE_INDEX, NO_LABEL, mask_labels

LinearKernel = Callable[[LinearProblem], LinearResult]

KERNELS: dict[str, LinearKernel] = {}
"""Kernels by device type that are used in place of `chunked`."""

DROP_BELOW = 0.9
"""On the CPU, rows that do not count are left out if at most this share of the rows does."""


def linear_cross_entropy(
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
) -> LossTerm:
    """Return the sum of cross_entropy(hidden @ weight.T + bias, targets) and the number of labels that count.

    `hidden` is (…, d), `weight` (V, d), `targets` (…) class indices; `mask` is shaped like the targets: elements where
    it is 0 do not count, and a floating mask also weighs the others. With `softcap` the logits are
    softcap · tanh(logits / softcap). Products are computed in the type of `hidden`, or of autocast; everything else in
    float32 at least. `chunk_tokens` is how many positions are computed at a time; by default a few dozen megabytes of
    logits. Gradients come with the values, so the result can be differentiated once, not twice. Raises TrainingError
    for shapes or types that do not fit, and on the CPU DataError for labels out of range.

    >>> hidden, weight = torch.zeros(2, 3, 8), torch.zeros(5, 8)
    >>> linear_cross_entropy(hidden, weight, torch.tensor([[0, 4, -100], [1, 2, -100]]))
    LossTerm(sum=tensor(6.4378), count=tensor(4), weight=1.0)
    """
    return linear_cross_entropy_terms(
        hidden,
        weight,
        targets,
        bias,
        mask=mask,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        metrics=False,
    )["loss"]


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
    metrics: bool,
) -> Terms:
    """Return "loss"; with `metrics` also "accuracy", and "nll", the loss without smoothing, if there is smoothing.

    The metrics come from the same pass. The arguments are those of `linear_cross_entropy`.
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
    grads = torch.is_grad_enabled()
    problem = LinearProblem(
        hidden=hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        labels=labels.masked_fill(~counted, 0).flatten(),
        row_weights=row_weights.flatten(),
        label_smoothing=label_smoothing,
        softcap=softcap,
        want_hidden=grads and hidden.requires_grad,
        want_weight=grads and weight.requires_grad,
        want_bias=grads and bias is not None and bias.requires_grad,
        chunk_rows=chunk_tokens,
    )
    try:
        total, nll, correct = _differentiable(problem.hidden, weight, bias, problem)
    except RuntimeError as error:
        _explain(error, labels, skip, weight.shape[0])
        raise
    terms = {"loss": LossTerm(total, count)}
    if metrics:
        terms["accuracy"] = LossTerm(correct, count, 0.0)
        if label_smoothing:
            terms["nll"] = LossTerm(nll, count, 0.0)
    return terms


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums of losses, of losses without smoothing and of correct predictions; only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: LinearProblem) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            result = _solve(problem, product_type(hidden))
        ctx.save_for_backward(result.grad_hidden, result.grad_weight, result.grad_bias)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        row_weights = problem.row_weights
        counts = row_weights != 0
        total, nll = (
            torch.where(counts, values, 0.0).mul_(row_weights).sum() for values in (result.losses, result.nlls)
        )
        correct = (row_weights * result.predicted.eq(problem.labels)).sum()
        ctx.mark_non_differentiable(nll, correct)
        return total, nll, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "linear_cross_entropy has no second derivative: use cross_entropy(linear(hidden, weight), targets) "
                "where create_graph=True is needed"
            )
        # Nobody sees the saved gradients again, unless the graph is kept: then they must stay as they are.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        found: list[Tensor | None] = []
        for saved, kind in zip(ctx.saved_tensors, ctx.types, strict=True):
            scaled = None if saved is None else saved.mul(grad) if keep else saved.mul_(grad)
            found.append(None if scaled is None else scaled.to(kind))
        return (*found, None)


_differentiable: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _LinearCrossEntropy.apply
)
"""The function with its gradients. torch.compile leaves it as it is: it would unroll the chunks."""


def _solve(problem: LinearProblem, product_type: torch.dtype) -> LinearResult:
    """Bring the problem into one type, leave out rows that do not count where that is cheap, and run the kernel."""
    kernel = KERNELS.get(problem.hidden.device.type, chunked)
    hidden, weight, bias = problem.hidden.detach(), problem.weight.detach(), problem.bias
    problem = replace(
        problem,
        weight=weight.to(product_type),
        bias=None if bias is None else bias.detach().to(problem.row_weights.dtype),
    )
    if hidden.is_cpu:  # on other devices the host would have to wait for the number of rows
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
    """Return the result of some rows as that of all; the others are 0."""

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(num_rows, *values.shape[1:]).index_copy_(0, rows, values)

    return part._replace(
        losses=spread(part.losses),
        nlls=spread(part.nlls),
        predicted=spread(part.predicted),
        grad_hidden=None if part.grad_hidden is None else spread(part.grad_hidden),
    )


def product_type(hidden: Tensor) -> torch.dtype:
    """Return the type in which products are computed: that of autocast, or of `hidden`."""
    kind, device = hidden.dtype, hidden.device.type
    if kind is not torch.float64 and torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    # Elsewhere float16 has no products that add up in float32.
    return torch.float32 if kind is torch.float16 and device != "cuda" else kind


def result_type(hidden: Tensor) -> torch.dtype:
    """Return the type of everything but products: float32, or float64 for hidden states in float64."""
    return torch.float64 if hidden.dtype is torch.float64 else torch.float32


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Raise TrainingError if shapes or types do not fit."""
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


def _explain(error: Exception, labels: Tensor, skip: int, num_classes: int) -> None:
    """Raise DataError in place of torch's error if a label is out of range."""
    if not labels.is_cpu:
        return  # after an error inside a kernel nothing can be read from a device
    bad = labels[(labels != skip) & ((labels < 0) | (labels >= num_classes))]
    if len(bad):
        raise DataError(
            f"labels out of range: found {int(bad[0])}, but there are {num_classes} classes (0 … {num_classes - 1})"
        ) from error
