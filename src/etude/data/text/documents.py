"""Whole documents of a token file, padded to the longest of the batch."""

import copy
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.text.columns import Columns, opened
from etude.data.text.padding import (
    IGNORED,
    Array,
    check_multiple,
    constant,
    filled,
    largest,
    padded_width,
    read_padded,
)
from etude.data.tokens.file import TokenFile


class TokenDocuments:
    """One document per sample: `DataLoader(TokenDocuments("train.bin"), batch_size=32)`.

    A batch is {"input_ids", "attention_mask", "labels"}: ids (B, L) padded on the right to the longest of the batch,
    the mask 1 for tokens and 0 for padding. Labels are the file's label of each sample (named "label" or "labels"),
    else its stream "labels" with one label per token, else the next token, -100 for the last one of a document and
    for padding. Other streams and labels of the file are included under their names; streams are padded with 0, or
    with the value in the file's metadata: `TokenWriter(…, meta={"padding": {"roles": -100}})`.

    Arguments:
        max_length: maximum tokens per sample; by default the whole document.
        pad_id: the padding id. pad_multiple: batches are padded to a multiple of it.
        long: what to do with documents of more than `max_length` tokens: "cut" drops the rest, "split" makes
            several samples of one document. Splitting holds one number per document in memory.
        labels: "next", "none", or the name of a stream or label of the file, instead of the default above.

    Next tokens come from the whole document: the last token of a part is followed by the first of the next part.
    """

    def __init__(
        self,
        file: TokenFile | str | Path,
        max_length: int | None = None,
        *,
        pad_id: int = 0,
        pad_multiple: int = 1,
        long: Literal["cut", "split"] = "cut",
        labels: str | None = None,
    ) -> None:
        if long not in ("cut", "split"):
            raise DataError(f"long is {long!r}; it must be 'cut' or 'split'")
        if long == "split" and max_length is None:
            raise DataError("long='split' needs a max_length; set it")
        check_multiple(pad_multiple)
        self.file = opened(file)
        if long == "cut" and not self.file.has_documents:
            raise DataError(
                f"the documents of {self.file.path} are unknown; open it with a document_end, read it as "
                "TokenBlocks, or set long='split' and a max_length"
            )
        self.pad_id, self.pad_multiple, self.long = pad_id, pad_multiple, long
        self.columns = Columns(self.file, labels, whole=True)
        self._cut(max_length)

    def _cut(self, max_length: int | None) -> None:
        if max_length is not None and max_length < 1:
            raise DataError(f"max_length is {max_length}; it must be at least 1")
        self.max_length = max_length
        self._pieces = self._count_pieces(max_length) if self.long == "split" and max_length is not None else None
        self._size = len(self.file) if self._pieces is None else int(self._pieces[-1])
        if not self._size:
            raise DataError(f"{self.file.path} has no documents; create it again")

    def __len__(self) -> int:
        return self._size

    @property
    def longest(self) -> int | None:
        """Maximum tokens per sample; None if documents are never shortened."""
        return self.max_length

    def with_length(self, length: int) -> "TokenDocuments":
        """Return the same documents, shortened or split at another length."""
        other = copy.copy(self)
        other._cut(length)
        return other

    def lengths(self, indices: Indices) -> Indices:
        """Return the number of tokens of samples."""
        return self._spans(indices)[2]

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the samples at `indices`, padded to the longest of them."""
        documents, starts, lengths, more = self._spans(indices)
        mask = filled(lengths, padded_width(largest(lengths), self.pad_multiple))
        ids = read_padded(self.file, starts, lengths, mask, self.pad_id)
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}

        def next_tokens() -> Array:
            labels = constant(ids.shape, IGNORED)
            np.copyto(labels[:, :-1], ids[:, 1:], where=mask[:, 1:])
            if more is not None and more.any():
                followed = np.flatnonzero(more)
                last = lengths[followed] - 1
                labels[followed, last] = self.file.rows(starts[followed] + last + 1, 1)[:, 0]
            return labels

        self.columns.add(
            batch, lambda name, fill: read_padded(self.file, starts, lengths, mask, fill, name), next_tokens
        )
        self.columns.add_samples(batch, documents)
        return batch

    def _spans(self, indices: Indices) -> tuple[Indices, Indices, Indices, Array | None]:
        """Documents, starts and lengths of samples, and which of them continue in another sample."""
        if self._pieces is None:
            starts, lengths = self.file.spans(indices)
            if self.max_length is None:
                return indices, starts, lengths, None
            return indices, starts, np.minimum(lengths, self.max_length), lengths > self.max_length
        assert self.max_length is not None
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self._size:
            raise DataError(
                f"samples {int(indices.min())} to {int(indices.max())} are not within 0 to {self._size - 1}"
            )
        documents = np.searchsorted(self._pieces, indices, side="right")
        starts, lengths = self.file.spans(documents)
        before = np.where(documents > 0, self._pieces[documents - 1], 0)
        skipped = (indices - before) * self.max_length
        rest = lengths - skipped
        return documents, starts + skipped, np.minimum(rest, self.max_length), rest > self.max_length

    def _count_pieces(self, max_length: int) -> Indices:
        """Cumulative number of parts of the documents; an empty document is one part."""
        pieces = self.file.lengths()
        pieces += max_length - 1
        pieces //= max_length
        np.maximum(pieces, 1, out=pieces)
        np.cumsum(pieces, out=pieces)
        return pieces if pieces.size else np.zeros(1, np.int64)
