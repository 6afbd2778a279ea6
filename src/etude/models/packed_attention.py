"""Attention within packed documents by torch's kernel for sequences of any length: no mask of length × length."""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.core.errors import TrainingError

TOKENS_PER_PLACE = 32
"""With fewer the kernel is not worth it: it starts blocks and pads buffers for all places, also for empty ones."""


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`: flash attention over documents that lie one after the other."""

    def takes(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel runs there, with heads of that type and size."""
        half = dtype in (torch.bfloat16, torch.float16)
        return device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256 and _has_flash(device.index)

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, longest: int, *, causal: bool
    ) -> Tensor:
        """Return what positions (T, H, E) gather within their documents, which end at `offsets` (documents + 1,)."""
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0 if causal else -1)  # all that is before, nothing or all of what is behind
        gathered = varlen_attn(queries, keys, values, offsets, offsets, longest, longest, window_size=window)
        assert isinstance(gathered, Tensor)
        return gathered


class DocumentSpans(NamedTuple):
    """Which positions see each other, for attention without a mask."""

    attend: VarlenAttention
    offsets: Tensor
    longest: int


def few_places(document_starts: Tensor, length: int) -> bool:
    """Whether rows of `length` tokens have so few places for documents that attention without a mask pays."""
    return document_starts.shape[-1] * TOKENS_PER_PLACE <= length


def document_offsets(document_starts: Tensor, rows: int, length: int) -> Tensor:
    """Return where documents begin in rows (B, L) laid one after the other, and the end: (B · places + 1,), int32.

    Places that hold `length` or more are documents of no tokens. Shapes depend on shapes only, and nothing waits.

    >>> document_offsets(torch.tensor([[0, 3, 4, 4], [0, 4, 4, 4]]), rows=2, length=4)
    tensor([0, 3, 4, 4, 4, 8, 8, 8, 8], dtype=torch.int32)
    """
    if document_starts.dim() != 2 or len(document_starts) != rows:
        raise TrainingError(
            f"document_starts have the shape {tuple(document_starts.shape)}; give (batch, places), here ({rows}, …)"
        )
    begins = torch.arange(0, rows * length, length, dtype=torch.int32, device=document_starts.device)
    flat = (document_starts.int().clamp(max=length) + begins[:, None]).flatten()
    return F.pad(flat, (0, 1), value=rows * length)


def _has_flash(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 0) and _has_windows()


# What torch.compiler.assume_constant_result does, which imports the compiler for it, even where nothing is compiled.
vars(_has_flash)["_dynamo_marked_constant"] = True


def _has_windows() -> bool:
    """Whether the installed torch says by a window which positions are seen; before, it had `is_causal`."""
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters
