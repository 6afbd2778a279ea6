"""Fixed-length blocks of a token file: the fastest way to feed a causal language model."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.permutation import Indices
from etude.data.tokens import TokenFile, open_tokens

LABELS = "labels"
"""The per-token stream that replaces next tokens as labels."""


class TokenBlocks:
    """Blocks of `length` tokens, one after the other, with the next tokens as labels. Documents are not looked at.

    A batch is {"input_ids": (B, length), "labels": (B, length)}: overlapping views of one piece of memory, so do not
    write into them. A per-token stream called "labels" is taken in place of next tokens; other streams come along
    under their names. With `moving` the blocks begin at another token every epoch, so that no token always stands
    at the edge of a block.
    """

    def __init__(self, file: TokenFile | str | Path, length: int, *, moving: bool = False) -> None:
        if length < 1:
            raise DataError(f"the length of blocks is {length}; it must be at least 1")
        self.file = file if isinstance(file, TokenFile) else open_tokens(file)
        self.length, self.moving = length, moving
        spare = self.length - 1 if moving else 0
        self.num_blocks = (self.file.num_tokens - 1 - spare) // length
        if self.num_blocks < 1:
            raise DataError(
                f"{self.file.path} has {self.file.num_tokens} tokens, too few for a block of {length} "
                f"and the token after it; use shorter blocks"
            )
        self.sample_bytes = 8 * (length + 1) * (1 + len(self.file.streams))

    def __len__(self) -> int:
        return self.num_blocks

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> dict[str, Tensor]:
        """Return the blocks at `indices`."""
        starts = self._starts(indices, epoch, seed)
        tokens = torch.from_numpy(self._read(starts, self.length + 1, None))
        batch = {"input_ids": tokens[:, :-1], LABELS: tokens[:, 1:]}
        for stream in self.file.streams:
            batch[stream] = torch.from_numpy(self._read(starts, self.length, stream))
        return batch

    def gather_many(self, indices: Indices, number: int, *, epoch: int, seed: int) -> list[dict[str, Tensor]]:
        """Return `number` batches, read together: what Python costs is shared by all of them."""
        starts, length, from_numpy = self._starts(indices, epoch, seed), self.length, torch.from_numpy
        # Rows are parted as arrays: that is quicker than to part a tensor.
        batches = [
            {"input_ids": from_numpy(part[:, :length]), LABELS: from_numpy(part[:, 1:])}
            for part in self._read(starts, length + 1, None).reshape(number, -1, length + 1)
        ]
        for stream in self.file.streams:
            parts = self._read(starts, length, stream).reshape(number, -1, length)
            for batch, part in zip(batches, parts, strict=True):
                batch[stream] = from_numpy(part)
        return batches

    def _starts(self, indices: Indices, epoch: int, seed: int) -> Indices:
        starts = indices * self.length
        return starts + mix(seed, epoch, 3) % self.length if self.moving else starts

    def _read(self, starts: Indices, length: int, stream: str | None) -> Indices:
        return self.file.rows(starts, length, stream).astype(np.int64)
