"""Expected-value losses of computed logits: blocks of them, with the plain formula."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from etude.multimodal.loss.fused import LossPart


def logits_sums(logits: Tensor, parts: Sequence[LossPart]) -> list[Tensor]:
    """Return the sum of the losses of every part."""
    with torch.autocast(logits.device.type, enabled=False):  # values need more precision than bf16
        return [
            (part.reconstruction.on(block.device, block.dtype).row_losses(block, part.targets) * weights).sum()
            for part, block, weights in _weighted_blocks(logits, parts)
        ]


@torch.no_grad()
def squared_error_sums(logits: Tensor, parts: Sequence[LossPart]) -> list[Tensor]:
    """Return the sum of squared errors of the expected value of every part."""
    sums = []
    with torch.autocast(logits.device.type, enabled=False):
        for part, block, weights in _weighted_blocks(logits, parts):
            own = part.reconstruction.on(block.device, block.dtype)
            sums.append((own.errors(torch.softmax(block, 1), part.targets).square_().mean(1) * weights).sum())
    return sums


def _weighted_blocks(logits: Tensor, parts: Sequence[LossPart]) -> Iterator[tuple[LossPart, Tensor, Tensor]]:
    """Yield the logits and the weights of every part's rows, in at least float32."""
    if not parts:
        return
    kind = torch.float64 if logits.dtype is torch.float64 else torch.float32
    for part, block in zip(parts, take_blocks(logits.reshape(-1, logits.shape[-1]), parts), strict=True):
        yield part, block.to(kind), part.row_weights.to(kind)


def take_blocks(logits: Tensor, parts: Sequence[LossPart]) -> tuple[Tensor, ...]:
    """Return the rows and columns of the logits (N, V) of each part."""
    found: tuple[Tensor, ...] = _Blocks.apply(logits, tuple(parts))  # type: ignore[no-untyped-call]
    return found


class _Blocks(torch.autograd.Function):
    """Blocks of a matrix; their gradients share one matrix, where torch's slices would allocate one each."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, parts: tuple[LossPart, ...]) -> Any:
        ctx.shape, ctx.slices = logits.shape, [part.slice for part in parts]
        ctx.save_for_backward(*(part.rows for part in parts))
        return tuple(
            logits[:, part.slice].contiguous()
            if part.rows is None
            else logits[:, part.slice].index_select(0, part.rows)
            for part in parts
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
