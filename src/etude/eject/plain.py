"""Functions and models that ejected files contain, written without the rest of the library.

They give the same bits as the code that they stand for, and each is copied into a file together with its imports.
"""

import gzip
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.core.random import mix

INIT_STD = 0.02


def read_idx(path: Path) -> Tensor:
    """Return the bytes of an idx file: a header with the number of dimensions and their sizes, then the values."""
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy())


def shuffled(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of the samples in an epoch: their numbers, sorted by a hash of them (splitmix64)."""
    words = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix(mix(seed, epoch)))
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(words ^ (words >> np.uint64(31)))


def permuted(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of the samples in an epoch: a Feistel network over the smallest rectangle that holds them.

    Numbers outside the samples pass through the network again, until they are inside.
    """
    key = mix(seed, epoch)
    rows = math.isqrt(size - 1) + 1
    extents = [np.uint32(rows), np.uint32(-(-size // rows))]
    keys = [(np.uint32(mix(key, n, 0) & 0xFFFFFFFF | 1), np.uint32(mix(key, n, 1) & 0xFFFFFFFF)) for n in range(4)]
    half = np.uint32(16)

    def network(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        halves = [values // extents[1], values % extents[1]]
        for number, (factor, offset) in enumerate(keys):
            moved, fixed = number % 2, 1 - number % 2
            hashed = halves[fixed] * factor + offset
            hashed = (hashed ^ (hashed >> half)) * np.uint32(0x85EBCA6B)
            shift = (hashed >> half) * extents[moved] >> half
            halves[moved] = (halves[moved] + shift) % extents[moved]
        return halves[0] * extents[1] + halves[1]

    values = network(np.arange(size, dtype=np.uint32))
    while (outside := np.flatnonzero(values >= size)).size:
        values[outside] = network(values[outside])
    return values.astype(np.int64)


class Transformer(nn.Module):
    """A causal language model: pre-norm blocks without biases, rotary positions, output tied to the embedding."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        d_ff: int | None = None,
        dropout: float = 0.1,
        tie_embeddings: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, d_ff or 4 * d_model, dropout) for _ in range(n_layers))
        self.norm = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            else:  # projections into the residual stream start smaller in deep models, as in GPT-2
                residual = name.endswith(("attention.project.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * n_layers) if residual else INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, L, V) of tokens (B, L)."""
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and an MLP, each with pre-norm and a residual connection."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = Attention(d_model, n_heads, dropout)
        self.mlp_norm = nn.RMSNorm(d_model)
        self.mlp = FeedForward(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next residual stream (B, L, D)."""
        shape = x.shape
        x = x.flatten(0, 1)
        x = x + self.dropout(self.attention(self.attention_norm(x).view(shape)).flatten(0, 1))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x.view(shape)


class Attention(nn.Module):
    """Causal self-attention with several heads and rotary positions."""

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.project = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention outputs (B, L, D)."""
        batch, length, width = x.shape
        queries_keys, values = self.qkv(x).view(batch, length, self.n_heads, 3, -1).split((2, 1), 3)
        queries, keys = rotate(queries_keys).permute(3, 0, 2, 1, 4).unbind()
        values = values.squeeze(3).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        gathered = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.project(gathered.transpose(1, 2).reshape(batch, length, width))
        return projected


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(gelu(up(x)))."""
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


def rotate(heads: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) of the features (B, L, H, 2, E) by the angle of its position."""
    length, size = heads.shape[1], heads.shape[-1]
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    angles = torch.arange(length)[:, None, None, None].float() * 10_000.0**-exponents
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    turned = heads.roll(size // 2, -1)
    return torch.addcmul(heads * torch.cat([cos, cos], -1), turned, torch.cat([-sin, sin], -1))
