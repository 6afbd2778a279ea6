"""Expected-value losses of logits that a model has computed: blocks of them, by the plain formula."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from etude.losses.meaningful.fused import Part


def logits_sums(logits: Tensor, parts: Sequence[Part]) -> tuple[list[Tensor], list[Tensor]]:
    """Return, for every part, the sum of its losses and that of its squared errors, as `expected_value_sums` does."""
    rows = logits.reshape(-1, logits.shape[-1])
    kind = torch.float64 if logits.dtype is torch.float64 else torch.float32
    losses, squares = [], []
    for part, block in zip(parts, take_blocks(rows, parts), strict=True):
        own = part.reconstruction.on(block.device, kind)
        weights = part.row_weights.to(kind)
        block = block.to(kind)
        losses.append((own.row_losses(block, part.targets) * weights).sum())
        with torch.no_grad():
            errors = own.errors(torch.softmax(block, 1), part.targets)
            squares.append((errors.square_().mean(1) * weights).sum())
    return losses, squares


def take_blocks(logits: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """Return the rows and columns of the logits (N, V) that each part is about."""
    found: tuple[Tensor, ...] = _Blocks.apply(logits, tuple(parts))  # type: ignore[no-untyped-call]
    return found


class _Blocks(torch.autograd.Function):
    """Blocks of a matrix; their gradients go into one matrix, where torch's slices would make one each."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, parts: tuple[Part, ...]) -> Any:
        ctx.shape, ctx.slices = logits.shape, [part.slice for part in parts]
        ctx.save_for_backward(*(part.rows for part in parts))
        return tuple(
            (logits if part.rows is None else logits[part.rows])[:, part.slice].contiguous() for part in parts
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].new_zeros(ctx.shape)
        for grad, columns, rows in zip(grads, ctx.slices, ctx.saved_tensors, strict=True):
            if rows is None:
                total[:, columns] = grad
            else:
                total[:, columns].index_add_(0, rows, grad)
        return total, None
