"""How much a step was: samples and tokens of its batches, counted beside the step, without asking the device."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from etude.core.batch import Batch, JointBatch, count_samples, inputs_of, is_next_token, padding_mask_of

ID_TYPES = frozenset({torch.int64, torch.int32})
"""What an embedding takes. Other integers, such as pixels, are not token ids."""


class Amounts(NamedTuple):
    """Amounts of one step on this rank."""

    samples: int = 0
    tokens: Tensor | int = 0
    """Padding left out; 0 where batches have none."""
    uncounted: int = 0
    """Batches that do not tell their samples; those of all others are in `samples`."""


NO_AMOUNTS = Amounts()


def measure(micro_batches: Sequence[Batch]) -> Amounts:
    """Return the amounts of a step; nothing waits for the device."""
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
    """Return how many token ids of a batch (B, L) the model sees, padding left out; 0 if it holds something else.

    A number, or a tensor on the device if only a mask tells.

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
        mask = documents >= 0  # packed documents: padding belongs to none
    return ids.numel() if mask is None or mask.shape != ids.shape else mask.count_nonzero()
