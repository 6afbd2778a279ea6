"""The tokens of a batch: which input holds them, and how many there are, without asking the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from etude.core.batch import Batch
from etude.core.calling import inputs_of, is_next_token, padding_mask_of

ID_TYPES = frozenset({torch.int64, torch.int32})
"""What an embedding takes. Other integers, of pixels for one, are not token ids."""


def token_ids(batch: Batch) -> Tensor | None:
    """Return the token ids that the model sees, (B, L), or None if the batch holds something else.

    >>> token_ids({"tokens": torch.tensor([[5, 6, 7]])})
    tensor([[5, 6]])
    >>> token_ids((torch.zeros(2, 3), torch.tensor([0, 1]))) is None
    True
    """
    is_tuple = isinstance(batch, (tuple, list))
    ids = (batch[0] if batch else None) if is_tuple else inputs_of(batch)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in ID_TYPES:
        return None
    return ids[:, :-1] if not is_tuple and isinstance(batch, Mapping) and is_next_token(batch) else ids


def count_tokens(batch: Batch, ids: Tensor) -> Tensor | int:
    """Return how many of these ids are no padding: a number, or a tensor on the device if only a mask tells.

    >>> batch = {"input_ids": torch.tensor([[5, 6], [7, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    >>> count_tokens(batch, token_ids(batch))
    tensor(3)
    """
    mask = padding_mask_of(batch)
    if mask is None and isinstance(batch, Mapping) and isinstance(documents := batch.get("document_ids"), Tensor):
        mask = documents >= 0  # packed documents: padding belongs to none
    return ids.numel() if mask is None or mask.shape != ids.shape else mask.count_nonzero()
