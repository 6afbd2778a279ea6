"""Attention within packed documents with torch's variable-length kernel: no (length × length) mask."""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.core.errors import TrainingError

TOKENS_PER_PLACE = 32
"""With fewer tokens per slot the kernel is not worthwhile: it launches blocks and pads buffers for empty slots."""


class VarlenAttention:
    """`torch.nn.attention.varlen.varlen_attn`: flash attention over concatenated documents."""

    def takes(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel supports this device, dtype and head size."""
        half = dtype in (torch.bfloat16, torch.float16)
        return device.type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256 and _has_flash(device.index)

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, longest: int, *, causal: bool
    ) -> Tensor:
        """Return attention outputs for (T, H, E) within documents that end at `offsets` (documents + 1,)."""
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0 if causal else -1)  # window: all earlier positions, and none or all of the later ones
        gathered = varlen_attn(queries, keys, values, offsets, offsets, longest, longest, window_size=window)
        assert isinstance(gathered, Tensor)
        return gathered


class DocumentSpans(NamedTuple):
    """Document boundaries, for attention without a mask."""

    attend: VarlenAttention
    offsets: Tensor
    longest: int


def few_places(document_starts: Tensor, length: int) -> bool:
    """Whether rows of `length` tokens have few enough document slots for attention without a mask to be faster."""
    return document_starts.shape[-1] * TOKENS_PER_PLACE <= length


def document_offsets(document_starts: Tensor, rows: int, length: int) -> Tensor:
    """Return the start offsets of documents in concatenated rows (B, L), and the end: (B · starts + 1,), int32.

    Starts of `length` or more are empty documents. Output shapes depend only on input shapes, and nothing
    synchronises.

    >>> document_offsets(torch.tensor([[0, 3, 4, 4], [0, 4, 4, 4]]), rows=2, length=4)
    tensor([0, 3, 4, 4, 4, 8, 8, 8, 8], dtype=torch.int32)
    """
    if document_starts.dim() != 2 or len(document_starts) != rows:
        raise TrainingError(
            f"document_starts have the shape {tuple(document_starts.shape)}; pass (batch, starts), here ({rows}, …)"
        )
    begins = torch.arange(0, rows * length, length, dtype=torch.int32, device=document_starts.device)
    flat = (document_starts.int().clamp(max=length) + begins[:, None]).flatten()
    return F.pad(flat, (0, 1), value=rows * length)


def _has_flash(index: int | None) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 0) and _has_windows()


# Does what torch.compiler.assume_constant_result does, which would import the compiler even if nothing is compiled.
vars(_has_flash)["_dynamo_marked_constant"] = True


def _has_windows() -> bool:
    """Whether the installed torch takes a window argument; earlier versions take `is_causal`."""
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters
