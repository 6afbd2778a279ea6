"""Self-attention with rotary positions: over a mask, over packed documents, or with a cache of earlier positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from etude.models.packed_attention import DocumentSpans

ROTARY_BASE = 10_000.0

Seen = Tensor | DocumentSpans | None
"""Attention pattern: a mask (B, 1, L, L), concatenated documents, or only `causal`."""


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = d_model // n_heads, dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.project = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Seen,
        cache: "LayerCache | None" = None,
        causal: bool = True,
    ) -> Tensor:
        """Return attention outputs over the positions of `mask`, or all, or the earlier ones if `causal`."""
        batch, length, _ = x.shape
        # The rows of a head are neighbours, so that processes can divide the heads; then there are fewer of them here.
        heads = self.qkv(x).view(batch, length, -1, 3, self.head_dim)
        turned, values = heads.split((2, 1), 3)  # so that their gradients are concatenated, not added
        queries, keys = rotate(turned, rotary).permute(3, 0, 2, 1, 4).unbind()  # (B, H, L, E) each
        values = values.squeeze(3).transpose(1, 2)
        is_causal = causal and mask is None
        if length == 1:  # a single new token attends to the whole cache
            is_causal = False
        if cache is not None:
            assert length == 1 or cache.length == 0, "the causal mask of the kernel begins at the first key"
            keys, values = cache.extend(keys, values)
        if isinstance(mask, DocumentSpans):
            queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (queries, keys, values))
            gathered = mask.attend(queries, keys, values, mask.offsets, mask.longest, causal=causal)
        else:
            dropout = self.dropout if self.training else 0.0
            gathered = F.scaled_dot_product_attention(
                queries, keys, values, mask, dropout_p=dropout, is_causal=is_causal
            ).transpose(1, 2)
        projected: Tensor = self.project(gathered.reshape(batch, length, -1))
        return projected


class LayerCache:
    """Keys and values (B, H, max_len, E) of one layer; the first `length` positions are filled."""

    def __init__(self, max_len: int, dtype: torch.dtype) -> None:
        self.max_len, self.dtype = max_len, dtype
        self.keys, self.values = torch.empty(0), torch.empty(0)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append positions; return all keys and values so far."""
        if not self.length:
            batch, heads, _, size = keys.shape
            shape = (batch, heads, self.max_len, size)
            self.keys, self.values = (part.new_empty(shape, dtype=self.dtype) for part in (keys, values))
        begin, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, begin : self.length] = keys
        self.values[:, :, begin : self.length] = values
        return self.keys[:, :, : self.length].to(keys.dtype), self.values[:, :, : self.length].to(values.dtype)


def attention_mask(
    tokens: Tensor, attn_mask: Tensor | None, document_ids: Tensor | None, *, causal: bool = True
) -> Tensor | None:
    """Return the attention mask (B, 1, L, L); None if `causal` alone describes it.

    Every position attends to itself, even padding: attention over no positions is NaN.

    >>> attention_mask(torch.zeros(1, 3), None, torch.tensor([[0, 0, 1]]))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    if attn_mask is None and document_ids is None:
        return None
    length = tokens.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
    seen = square.tril() if causal else square
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
    if attn_mask is not None:
        seen = seen & attn_mask.bool()[:, None, :] | torch.eye(length, dtype=torch.bool, device=tokens.device)
    return seen[:, None]


def rotary_angles(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, (L, 1, 1, E) or (B, L, 1, 1, E), that rotate the halves of a head.

    Always computed in float32: in half precision, distant positions would coincide.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[..., None, None, None].float() * ROTARY_BASE**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


@library.custom_op("etude::rotary_angles", mutates_args=())
def angles_at_once(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """As `rotary_angles`, one operator to a compiler."""
    return rotary_angles(position_ids, head_dim)


@angles_at_once.register_fake
def _shapes_of_angles(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    shape = (*position_ids.shape, 1, 1, head_dim)
    return position_ids.new_empty(shape, dtype=torch.float32), position_ids.new_empty(shape, dtype=torch.float32)


def rotate(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + E/2) of features (…, L, H, N, E) by the angle of its position.

    With `roll` this takes three passes over memory, a third of the cost of the formula on halves; compiled it is one
    pass.
    """
    cos, sin = (part.to(heads.dtype) for part in rotary)
    half = heads.shape[-1] // 2
    if not torch.compiler.is_compiling():
        return torch.addcmul(heads * cos, heads.roll(half, -1), sin)
    first, second = heads.view(*heads.shape[:-1], 2, half).unbind(-2)
    cos, sin = cos[..., half:], sin[..., half:]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -2).flatten(-2)
