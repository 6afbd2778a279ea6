"""Documents packed into full blocks, with their boundaries."""

import copy
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from etude.core.batch import DOCUMENT_STARTS
from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.text.columns import Columns, opened
from etude.data.text.layouts import FitLayout, Pieces, SplitLayout
from etude.data.text.padding import IGNORED, Array, Mask, constant, filled, ranges, read_padded, scatter
from etude.data.tokens.file import TokenFile

Attention = Literal["ids", "starts", "full"]
"""How batches describe which tokens attend to each other."""


class PackedDocuments:
    """Blocks of `length` tokens made of several documents: `DataLoader(PackedDocuments("train.bin", 1024))`.

    A batch is {"input_ids", "labels", "position_ids", "document_ids"}, all (B, length), and "document_starts".
    Positions count from 0 in each part of a document, documents from 0 in each block; padding has position 0 and
    document -1. Labels are the next token of the same document, -100 at its end and at padding; a stream "labels" of
    the file replaces them. Other streams are included under their names; labels of whole samples are not. There is no
    "attention_mask": a two-dimensional one cannot separate documents, and makes Hugging Face's causal models ignore
    the positions, which do.

    Arguments:
        strategy: "split" concatenates documents in file order and splits them every `length`
            tokens: no padding, nothing stored. "fit" splits only documents longer than `length` (into parts of
            `length` and a rest) and packs whole ones by best fit, longest first; `fill` says how full blocks are. It
            takes 13 bytes of memory per document. Which documents share a block is determined by `seed`, once.
        last: an incomplete last block of "split": "drop" omits it, "pad" pads it.
        labels: "next", "none", or the name of a stream, instead of the default above.
        attention: "starts" adds "document_starts", where documents and padding begin in each block: with it
            attention kernels need no mask. It is (B, starts), int32, equally many for all blocks; unused ones
            are `length`. "ids" omits it: a model builds the mask from `document_ids` or from where `position_ids`
            restart. "full" adds the mask for other models: "attention_mask" is then (B, 1, length, length), bool.
        causal: whether that mask hides what comes after a token.
    """

    def __init__(
        self,
        file: TokenFile | str | Path,
        length: int,
        strategy: Literal["split", "fit"] = "split",
        *,
        pad_id: int = 0,
        last: Literal["drop", "pad"] = "drop",
        labels: str | None = None,
        attention: Attention = "starts",
        causal: bool = True,
        seed: int = 0,
    ) -> None:
        given = {"strategy": (strategy, ("split", "fit")), "last": (last, ("drop", "pad"))}
        for name, (value, allowed) in (given | {"attention": (attention, get_args(Attention))}).items():
            if value not in allowed:
                raise DataError(f"{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}")
        self.file = opened(file)
        self.strategy, self.last, self.attention, self.causal = strategy, last, attention, causal
        self.pad_id, self.seed = pad_id, seed
        self.columns = Columns(self.file, labels, whole=False)
        self._lay_out(length)

    def _lay_out(self, length: int) -> None:
        if length < 1:
            raise DataError(f"the length of blocks is {length}; it must be at least 1")
        self.length = length
        self._layout: SplitLayout | FitLayout
        if self.strategy == "split":
            self._layout = SplitLayout(self.file, length, pad_last=self.last == "pad")
        else:
            self._layout = FitLayout(self.file, length, seed=self.seed)
        if not len(self):
            raise DataError(
                f"{self.file.path} has {self.file.num_tokens:,} tokens, too few for a block of {length:,}; use shorter "
                f"blocks, or last='pad'"
            )
        # Documents, padding, and one spare: blocks padded by a mixture keep their last document separate.
        self._places = 1 << (self._layout.most_pieces() + 1).bit_length() if self.attention == "starts" else 0

    def __len__(self) -> int:
        return self._layout.num_blocks

    @property
    def fill(self) -> float:
        """The fraction of all positions that hold a token."""
        return 1 - self._layout.num_padding / (len(self) * self.length)

    @property
    def longest(self) -> int:
        """Tokens per block."""
        return self.length

    def with_length(self, length: int) -> "PackedDocuments":
        """Return the same documents packed into blocks of another length."""
        other = copy.copy(self)
        other._lay_out(length)
        return other

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the blocks at `indices`."""
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise DataError(
                f"blocks {int(indices.min())} to {int(indices.max())} are not within 0 to {len(self) - 1}"
            )
        pieces = self._layout.pieces(indices)
        first = _first(pieces)
        used = np.add.reduceat(pieces.lengths, first)
        mask = filled(used, self.length)
        # The parts of a block that was cut from the file are adjacent: they are read as one.
        spans = (pieces.starts[first], used) if self.strategy == "split" else (pieces.starts, pieces.lengths)
        ids = self._read(spans, mask, None, self.pad_id)
        batch = {"input_ids": torch.from_numpy(ids)}
        positions, documents = _numbered(pieces, mask)
        batch["position_ids"], batch["document_ids"] = torch.from_numpy(positions), torch.from_numpy(documents)
        self.columns.add(
            batch,
            lambda name, fill: self._read(spans, mask, name, fill),
            lambda: self._next_tokens(ids, mask, pieces),
        )
        if self.attention == "starts":
            batch[DOCUMENT_STARTS] = torch.from_numpy(_starts(pieces, used, self.length, self._places))
        if self.attention == "full":
            batch["attention_mask"] = document_mask(batch["document_ids"], causal=self.causal)
        return batch

    def _read(self, spans: tuple[Indices, Indices], mask: Mask, stream: str | None, fill: int) -> Array:
        if self.strategy == "split":
            return read_padded(self.file, *spans, mask, fill, stream)
        return scatter(self.file.read(*spans, stream), mask, fill)

    def _next_tokens(self, ids: Array, mask: Mask, pieces: Pieces) -> Array:
        """Next tokens within the block; then the last token of every part gets the label of its document."""
        labels = constant(ids.shape, IGNORED)
        np.copyto(labels[:, :-1], ids[:, 1:], where=mask[:, 1:])
        labels.reshape(-1)[_flat_starts(pieces, self.length) + pieces.lengths - 1] = IGNORED
        # Only the last part of a full block can continue, with the next token of the file.
        final = np.cumsum(pieces.counts) - 1
        follows = pieces.starts[final] + pieces.lengths[final]
        goes_on = ~pieces.ends[final]
        labels[goes_on, -1] = self.file.rows(follows[goes_on], 1)[:, 0]
        return labels


def _starts(pieces: Pieces, used: Indices, length: int, places: int) -> Array:
    """Starts of documents in their blocks, then of the padding, (blocks, starts); `length` if unused."""
    starts = np.full((len(pieces.counts), places), length, np.int32)
    rows = np.repeat(np.arange(len(pieces.counts)), pieces.counts)
    within = ranges(np.zeros_like(pieces.counts), pieces.counts)
    starts[rows, within] = _flat_starts(pieces, length) - rows * length
    starts[np.arange(len(used)), pieces.counts] = used
    return starts


def _flat_starts(pieces: Pieces, length: int) -> Indices:
    """Starts of parts in the flattened batch."""
    rows = np.repeat(np.arange(len(pieces.counts)), pieces.counts)
    before = np.cumsum(pieces.lengths) - pieces.lengths
    return before - before[_first(pieces)][rows] + rows * length


def _first(pieces: Pieces) -> Indices:
    """The first part of each block."""
    return np.cumsum(pieces.counts) - pieces.counts


def _numbered(pieces: Pieces, mask: Mask) -> tuple[Array, Array]:
    """Positions within parts, and numbers of parts within blocks."""
    before = np.cumsum(pieces.lengths) - pieces.lengths
    numbers = ranges(np.zeros_like(pieces.counts), pieces.counts)
    total = int(pieces.lengths.sum())
    positions = np.arange(total) - np.repeat(before, pieces.lengths)
    documents = np.repeat(numbers, pieces.lengths)
    if total == mask.size:
        return positions.reshape(mask.shape), documents.reshape(mask.shape)
    return scatter(positions, mask, 0), scatter(documents, mask, -1)


def document_mask(document_ids: Tensor, *, causal: bool = True, dtype: torch.dtype = torch.bool) -> Tensor:
    """Return the mask (B, 1, L, L) of packed blocks: true where the row's token may attend to the column's.

    With `causal` a token attends to itself and earlier ones, without (masked language models) to its whole document.
    A floating-point `dtype` gives an additive mask: 0 where allowed, else the most negative number. Padding (document
    -1) attends to padding, so that no row is empty. It runs on the device of `document_ids`: for a GPU, create the
    mask there, as it is L times as large as the ids.

    >>> document_mask(torch.tensor([[0, 0, 1]])).int()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 0, 1]]]], dtype=torch.int32)
    """
    seen = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if causal:
        length = document_ids.shape[1]
        seen &= torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    if dtype == torch.bool:
        return seen
    hidden = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)
