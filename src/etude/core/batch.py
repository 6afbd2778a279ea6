"""Batches in every form users bring: a tensor, a tuple, a mapping, a `DataBatch`; and where each keeps what.

A mapping with `tokens` and no labels is a next-token batch, whose targets are `tokens[:, 1:]`; with labels it is a
mapping like any other.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Batch = Any
"""Tensor · (input,) · (input, …, labels) · DataBatch · mapping with `input_ids`, `tokens` or other inputs."""
STREAM = "stream"
"""The key under which a batch that comes from a named stream of data keeps the stream's name."""
LABEL_KEYS = ("labels", "label", "targets", "target")
"""Keys under which a mapping holds its labels; the first one present is taken."""
DOCUMENT_STARTS = "document_starts"
"""The key under which packed documents (B, L) keep where each of them begins in its row, (B, places)."""
SETTING_KEYS = (STREAM, "causal", DOCUMENT_STARTS)
"""What a batch says about itself or asks of the model. No inputs: only a `forward` that names them is given them."""


class DataBatch(NamedTuple):
    """Inputs and labels of one batch."""

    data: Tensor
    labels: Tensor | None


class JointBatch(list[Batch]):
    """Batches of several streams that make one step together, each of them a mapping with its stream's name.

    >>> joint = JointBatch([{"x": torch.zeros(2, 3), STREAM: "a"}, {"x": torch.zeros(5, 3), STREAM: "b"}])
    >>> num_samples(joint)
    7
    """


def batch_labels(batch: Batch) -> Any:
    """Return the labels of a batch, or None if it has none.

    >>> batch_labels((torch.zeros(2, 3), torch.tensor([1, 0])))
    tensor([1, 0])
    >>> batch_labels({"input_ids": torch.zeros(2, 3)}) is None
    True
    """
    if isinstance(batch, Tensor):
        return None
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    return batch[-1] if len(batch) > 1 else None


def targets_of(batch: Batch) -> tuple[Any, bool]:
    """Return the labels of a batch (None if it has none), and whether they are already the next tokens.

    >>> import torch
    >>> targets_of({"tokens": torch.tensor([[5, 6, 7]])})
    (tensor([[6, 7]]), True)
    >>> targets_of((torch.zeros(1, 3), torch.tensor([2])))
    (tensor([2]), False)
    """
    if isinstance(batch, (tuple, list)):
        return (batch[-1] if len(batch) > 1 else None), False
    if isinstance(batch, Mapping) and is_next_token(batch):
        return batch["tokens"][:, 1:], True
    return batch_labels(batch), False


def inputs_of(batch: Batch) -> Any:
    """Return the main input of a batch: the first of a tuple, `input_ids` or the first non-label of a mapping."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        if "input_ids" in batch:
            return batch["input_ids"]
        return next((batch[key] for key in batch if key not in LABEL_KEYS and key not in SETTING_KEYS), None)
    return batch[0]


def padding_mask_of(batch: Batch) -> Tensor | None:
    """Return the (B, L) mask of real positions, aligned with the labels of `targets_of`, or None.

    Attention masks of other shapes, (B, 1, L, L) for one, say who sees whom and not what is padding.
    """
    if not isinstance(batch, Mapping):
        return None
    mask = next((batch[key] for key in ("attention_mask", "attn_mask") if key in batch), None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return mask[:, 1:] if is_next_token(batch) else mask


def is_next_token(keys: Collection[str]) -> bool:
    """Whether a mapping with these keys is a next-token batch: `tokens` that are inputs and targets at once."""
    return "tokens" in keys and "input_ids" not in keys and not any(key in keys for key in LABEL_KEYS)


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Apply `function` to every tensor of a batch and keep its form.

    >>> map_tensors({"x": torch.ones(2)}, lambda t: t + 1)
    {'x': tensor([2., 2.])}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor to `device`; from pinned memory the copy does not wait."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))


def hand_out_parts(whole: Tensor) -> Tensor:
    """Say of a tensor that batches are parts of it, and that it is left alone afterwards; return it.

    >>> came_together(hand_out_parts(torch.zeros(4))[2:]), came_together(torch.zeros(4)[2:])
    (True, False)
    """
    whole.has_batches = True  # type: ignore[attr-defined]
    return whole


def came_together(part: Tensor) -> bool:
    """Whether a tensor is a part of one that `hand_out_parts` was called with."""
    return getattr(part._base, "has_batches", False)


def first_tensor(batch: Batch) -> Tensor | None:
    """Return the first tensor of a batch in its own order, or None."""
    if isinstance(batch, Tensor):
        return batch
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((found for value in values if (found := first_tensor(value)) is not None), None)


def num_samples(batch: Batch) -> int:
    """Return the length of the first dimension: how many samples the batch holds.

    >>> num_samples({"input_ids": torch.zeros(4, 7)})
    4
    """
    if isinstance(batch, JointBatch):
        return sum(num_samples(part) for part in batch)
    tensor = first_tensor(batch)
    if tensor is None:
        return 0
    return tensor.shape[0] if tensor.dim() else 1


def is_empty(batch: Batch) -> bool:
    """Whether a batch has tensors, and no sample in any of them.

    >>> import torch
    >>> is_empty({"x": torch.zeros(0, 3)}), is_empty({"x": torch.zeros(2, 3)}), is_empty(["words"])
    (True, False, False)
    """
    lengths: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        lengths.append(tensor.shape[0] if tensor.dim() else 1)
        return tensor

    map_tensors(batch, note)
    return bool(lengths) and not any(lengths)
