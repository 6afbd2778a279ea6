"""Fixed-length blocks of a token file: the fastest way to feed a causal language model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order.permutation import Indices
from etude.data.tokens.file import TokenFile
from etude.data.tokens.opening import open_tokens

LABELS = "labels"
"""The per-token stream that replaces next tokens as labels."""


class TokenBlocks:
    """Consecutive blocks of `length` tokens, with the next tokens as labels. Document boundaries are ignored.

    A batch is {"input_ids": (B, length), "labels": (B, length)}: overlapping views of one memory block, so do not
    write into them. A per-token stream named "labels" replaces next tokens; other streams are included under their
    names. With `moving` the blocks begin at another token every epoch, so that no token is always at the edge of a
    block.
    """

    def __init__(self, file: TokenFile | str | Path, length: int, *, moving: bool = False) -> None:
        if length < 1:
            raise DataError(f"the length of blocks is {length}; it must be at least 1")
        self.file = file if isinstance(file, TokenFile) else open_tokens(file)
        self.length, self.moving = length, moving
        spare = self.length - 1 if moving else 0
        self.num_blocks = (self.file.num_tokens - 1 - spare) // length
        if self.num_blocks < 1:
            room = f"that moves by up to {spare}, and" if moving else "and"
            raise DataError(
                f"{self.file.path} has {self.file.num_tokens} tokens, too few for a block of {length} {room} "
                f"the token after it; use shorter blocks"
            )
        self.sample_bytes = 8 * (length + 1) * (1 + len(self.file.streams))

    def __len__(self) -> int:
        return self.num_blocks

    @property
    def longest(self) -> int:
        """Tokens per block."""
        return self.length

    def with_length(self, length: int) -> "TokenBlocks":
        """Return blocks of another length of the same file."""
        return TokenBlocks(self.file, length, moving=self.moving)

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> dict[str, Tensor]:
        """Return the blocks at `indices`; ids and labels are views of one tensor and move to a device together."""
        rows, streams = self._read(indices, 1, epoch, seed)
        tokens = torch.from_numpy(rows[0].astype(np.int64))
        batch = {"input_ids": tokens[:, :-1], LABELS: tokens[:, 1:]}
        return batch | {name: torch.from_numpy(values[0].astype(np.int64)) for name, values in streams.items()}

    def gather_many(self, indices: Indices, number: int, *, epoch: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Return `number` batches whose tokens are read together, and converted to int64 one batch at a time."""
        length, from_numpy = self.length, torch.from_numpy
        rows, streams = self._read(indices, number, epoch, seed)
        for place, part in enumerate(rows):
            # Slicing arrays is faster than slicing tensors.
            tokens = part.astype(np.int64)
            batch = {"input_ids": from_numpy(tokens[:, :length]), LABELS: from_numpy(tokens[:, 1:])}
            for name, values in streams.items():
                batch[name] = from_numpy(values[place].astype(np.int64))
            yield batch

    def _read(
        self, indices: Indices, number: int, epoch: int, seed: int
    ) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
        """Return the tokens of `number` batches, each block with the token after it, and their streams."""
        length = self.length
        starts = indices * length
        if self.moving:
            starts += mix(seed, epoch, 3) % length
        rows = self.file.rows(starts, length + 1).reshape(number, -1, length + 1)
        streams = {
            name: self.file.rows(starts, length, name).reshape(number, -1, length) for name in self.file.streams
        }
        return rows, streams
