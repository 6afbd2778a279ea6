"""Samples and tokens of a step, counted on the host without synchronising."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from etude.core.batch import Batch, JointBatch, count_samples, inputs_of, is_next_token, padding_mask_of

ID_TYPES = frozenset({torch.int64, torch.int32})
"""Dtypes that an embedding accepts. Other integers, such as pixels, are not token ids."""


class Amounts(NamedTuple):
    """Counts of one step on this rank."""

    samples: int = 0
    tokens: Tensor | int = 0
    """Padding excluded; 0 if batches have no tokens."""
    uncounted: int = 0
    """Batches with an unknown number of samples; all others are counted in `samples`."""


NO_AMOUNTS = Amounts()


def measure(micro_batches: Sequence[Batch]) -> Amounts:
    """Return the counts of a step without synchronising."""
    samples, uncounted = 0, 0
    tokens: Tensor | int = 0
    for batch in micro_batches:
        count = count_samples(batch)
        if count is None:
            uncounted += 1
        else:
            samples += count
        for part in batch if isinstance(batch, JointBatch) else (batch,):
            tokens = tokens + count_tokens(part)
    return Amounts(samples, tokens, uncounted)


def count_tokens(batch: Batch) -> Tensor | int:
    """Return the number of token ids (B, L) in a batch without padding; 0 if it holds something else.

    It is a number, or a tensor on the device if it depends on a mask.

    >>> ids, mask = torch.tensor([[5, 6], [7, 0]]), torch.tensor([[1, 1], [1, 0]])
    >>> count_tokens({"input_ids": ids}), count_tokens({"input_ids": ids, "attention_mask": mask})
    (4, tensor(3))
    >>> count_tokens({"tokens": torch.tensor([[5, 6, 7]])}), count_tokens((torch.zeros(2, 3), torch.tensor([0, 1])))
    (2, 0)
    """
    ids = inputs_of(batch)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in ID_TYPES:
        return 0
    if isinstance(batch, Mapping) and is_next_token(batch):
        ids = ids[:, :-1]
    mask = padding_mask_of(batch)
    if mask is None and isinstance(batch, Mapping) and isinstance(documents := batch.get("document_ids"), Tensor):
        mask = documents >= 0  # packed documents: padding belongs to no document
    return ids.numel() if mask is None or mask.shape != ids.shape else mask.count_nonzero()
