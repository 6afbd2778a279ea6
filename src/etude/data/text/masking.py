"""Masked language modelling: hidden tokens are chosen by a hash of (seed, epoch, sample, position)."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order.permutation import GOLDEN, Indices, scramble
from etude.data.sources.base import BatchSource, MeasuredSource, OrderedSource, ResizableSource
from etude.data.text.padding import IGNORED

Words = NDArray[np.uint64]

_HALF_WORD = np.uint64(32)
_MASKED, _REPLACED = round(0.8 * 2**32), round(0.9 * 2**32)
"""Of chosen tokens, 80 % are hidden, 10 % replaced by another one, and 10 % stay."""


def sample_keys(indices: Indices, *, epoch: int, seed: int) -> Words:
    """Return a key for each sample: a hash of (seed, epoch, index).

    >>> a, b = sample_keys(np.array([4, 7]), epoch=1, seed=0), sample_keys(np.array([7]), epoch=1, seed=0)
    >>> bool(a[1] == b[0]), bool(a[0] == a[1])
    (True, False)
    """
    return scramble(indices.astype(np.uint64) * GOLDEN + np.uint64(mix(seed, epoch, 7)))


def mask_tokens(
    ids: Tensor,
    *,
    sample_keys: Words,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    special_ids: Sequence[int] = (),
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids with hidden tokens and the corresponding labels, as in BERT.

    Each token is chosen with probability `rate`. Of the chosen ones 80 % become `mask_id`, 10 % a random token of the
    vocabulary, and the rest do not change. Labels are the original ids at the chosen positions,
    -100 elsewhere. `special_ids` and padding (where `attention_mask` is 0) are never chosen, and special ids are
    never inserted.

    The choice is a hash of the sample's key and the position in the sample (see `sample_keys`), so it does not depend
    on the batch, its padding, the process or earlier draws. The arguments are not changed.

    >>> keys = sample_keys(np.array([0, 1]), epoch=0, seed=0)
    >>> text = torch.arange(20).reshape(2, 10) + 5
    >>> hidden, labels = mask_tokens(text, sample_keys=keys, mask_id=1, vocab_size=30, special_ids=[0])
    >>> bool((labels[hidden != text] == text[hidden != text]).all())
    True
    """
    masking = _Masking(mask_id, vocab_size, rate, special_ids)
    return masking(ids, sample_keys, attention_mask)


class MaskedTokens:
    """Any source of token ids, masked again every epoch: `MaskedTokens(TokenBlocks("train.bin", 512), mask_id=103, …)`.

    Batches are those of the source with `input_ids` masked and `labels` replaced: the ids at the hidden positions,
    -100 elsewhere, as the loss `masked_language_modeling` expects. See `mask_tokens` for the arguments. A packed
    source with full masks needs `causal=False`.
    """

    def __init__(
        self,
        source: BatchSource,
        mask_id: int,
        vocab_size: int,
        *,
        rate: float = 0.15,
        special_ids: Sequence[int] = (),
    ) -> None:
        self._masking = _Masking(mask_id, vocab_size, rate, special_ids)
        self._attach(source)

    def _attach(self, source: BatchSource) -> None:
        self.source = source
        # Other attributes of the source also hold for masked samples, and loaders look them up by name.
        if isinstance(source, MeasuredSource):
            self.lengths = source.lengths
        if isinstance(source, OrderedSource):
            self.order = source.order
        if isinstance(source, ResizableSource):
            self.longest = source.longest
            self.with_length = self._with_length

    def __len__(self) -> int:
        return len(self.source)

    def _with_length(self, length: int) -> "MaskedTokens":
        """Return the source with samples of another length, masked in the same way."""
        assert isinstance(self.source, ResizableSource)
        masked = copy.copy(self)
        masked._attach(self.source.with_length(length))
        return masked

    def gather(self, indices: Indices, *, epoch: int, seed: int) -> dict[str, Tensor]:
        """Return the samples at `indices`, masked."""
        batch: dict[str, Tensor] = dict(self.source.gather(indices, epoch=epoch, seed=seed))
        # A four-dimensional mask does not show padding; in packed documents it has the id -1.
        real = batch["document_ids"] >= 0 if "document_ids" in batch else batch.get("attention_mask")
        keys = sample_keys(indices, epoch=epoch, seed=seed)
        batch["input_ids"], batch["labels"] = self._masking(batch["input_ids"], keys, real)
        return batch


class _Masking:
    """The validated settings, and the masking."""

    def __init__(
        self,
        mask_id: int,
        vocab_size: int,
        rate: float,
        special_ids: Sequence[int],
    ) -> None:
        if not 0 < rate <= 1:
            raise DataError(f"rate is {rate}; it must be above 0 and at most 1")
        special = np.unique(np.array([mask_id, *special_ids], np.int64))
        if special[0] < 0 or special[-1] >= vocab_size:
            raise DataError(f"mask_id and special_ids are {special.tolist()}; ids must be 0 to {vocab_size - 1}")
        if len(special) == vocab_size:
            raise DataError(f"all {vocab_size} ids are special, so none can replace a token")
        self.mask_id, self.special, self.num_plain = mask_id, special, vocab_size - len(special)
        self.threshold = np.uint64(max(round(rate * 2**64) - 1, 0))
        # Ordinary ids are numbered without the special ones: number n is id n plus the special ids before it.
        self.before = special - np.arange(len(special))

    def __call__(self, ids: Tensor, keys: Words, real: Tensor | None) -> tuple[Tensor, Tensor]:
        if ids.dim() != 2 or ids.dtype != torch.int64 or ids.device.type != "cpu":
            raise DataError(
                f"ids are {ids.dtype} of shape {tuple(ids.shape)} on {ids.device}; pass int64 of shape (B, L) on "
                "the CPU"
            )
        if len(keys) != len(ids):
            raise DataError(f"there are {len(keys)} keys for {len(ids)} samples; pass one per sample")
        words = scramble(keys[:, None] + np.arange(ids.shape[1], dtype=np.uint64) * GOLDEN)
        wanted = words <= self.threshold
        if real is not None:
            wanted &= real.numpy() != 0
        places = np.flatnonzero(wanted)
        result = ids.numpy().copy()
        flat, labels = result.reshape(-1), np.full(result.size, IGNORED)
        originals = flat[places]
        plain = np.isin(originals, self.special, invert=True)
        places, originals = places[plain], originals[plain]
        labels[places] = originals
        flat[places] = self._instead(originals, scramble(words.reshape(-1)[places] + GOLDEN))
        return torch.from_numpy(result), torch.from_numpy(labels.reshape(result.shape))

    def _instead(self, originals: NDArray[Any], words: Words) -> NDArray[Any]:
        """Replacements at the chosen positions: the upper half of a word selects the kind, the lower half the id."""
        how = words >> _HALF_WORD
        which = (((words & np.uint64(2**32 - 1)) * np.uint64(self.num_plain)) >> _HALF_WORD).view(np.int64)
        which += np.searchsorted(self.before, which, side="right")
        return np.where(how < _MASKED, self.mask_id, np.where(how < _REPLACED, which, originals))
