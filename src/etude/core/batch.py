"""Batches in every form that users pass, and where each form holds its inputs and labels.

A batch is a tensor, a tuple or list (inputs …, labels), a mapping, a dataclass, or any object with its own `.to`: a
PyTorch Geometric `Batch`, a `PackedSequence`, a tensordict. All of them may be nested. Code that moves, pins, counts
or copies batches uses one traversal, `map_tensors`.

A mapping with `tokens` and no labels is a next-token batch: its targets are `tokens[:, 1:]`. With labels it is
treated like any other mapping.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from etude.core.errors import DataError
from etude.core.forms import kind_of, moves_without_waiting, parts_of, with_parts
from etude.core.spans import span

Batch = Any
"""Tensor · (input,) · (input, …, labels) · DataBatch · mapping with `input_ids`, `tokens` or other inputs · object."""
STREAM = "stream"
"""The key that holds the name of the stream a batch was read from."""
LABEL_KEYS = ("labels", "label", "targets", "target")
"""Keys that may hold the labels of a mapping; the first one present is used."""
LABEL_ATTRIBUTES = ("y", *LABEL_KEYS)
"""Attributes that may hold the labels of an object; the first one present is used."""
DOCUMENT_STARTS = "document_starts"
"""The key of the start offsets of packed documents within their row: (B, starts) for tokens (B, L)."""
SETTING_KEYS = (STREAM, "causal", DOCUMENT_STARTS)
"""Keys of metadata and model options. They are passed only to a `forward` that names them."""


class DataBatch(NamedTuple):
    """Inputs and labels of one batch; `inputs` and `targets` are other names for them.

    >>> DataBatch(torch.zeros(2, 3), torch.tensor([1, 0])).targets
    tensor([1, 0])
    """

    data: Tensor
    labels: Tensor | None

    @property
    def inputs(self) -> Tensor:
        """The inputs."""
        return self.data

    @property
    def targets(self) -> Tensor | None:
        """The labels."""
        return self.labels


_PAIRS = frozenset({tuple, list, DataBatch})
"""The common forms of a batch, recognised by type alone."""


class JointBatch(list[Batch]):
    """Batches of several streams that make one step together; each is a mapping with the name of its stream.

    >>> joint = JointBatch([{"x": torch.zeros(2, 3), STREAM: "a"}, {"x": torch.zeros(5, 3), STREAM: "b"}])
    >>> num_samples(joint)
    7
    """


def batch_labels(batch: Batch) -> Any:
    """Return the labels of a batch, or None if it has none; for an object, its attribute `y` or `labels`.

    >>> batch_labels((torch.zeros(2, 3), torch.tensor([1, 0])))
    tensor([1, 0])
    >>> batch_labels({"input_ids": torch.zeros(2, 3)}) is None
    True
    """
    kind = kind_of(batch)
    if kind == "tuple":
        return batch[-1] if len(batch) > 1 else None
    if kind == "mapping":
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    if isinstance(batch, Tensor):
        return None
    found = (getattr(batch, name, None) for name in LABEL_ATTRIBUTES)
    return next((labels for labels in found if labels is not None), None)


def targets_of(batch: Batch) -> tuple[Any, bool]:
    """Return the labels of a batch (None if it has none), and whether they are already shifted to the next tokens.

    >>> import torch
    >>> targets_of({"tokens": torch.tensor([[5, 6, 7]])})
    (tensor([[6, 7]]), True)
    >>> targets_of((torch.zeros(1, 3), torch.tensor([2])))
    (tensor([2]), False)
    """
    if type(batch) in _PAIRS:
        return (batch[-1] if len(batch) > 1 else None), False
    if kind_of(batch) == "mapping" and is_next_token(batch):
        return batch["tokens"][:, 1:], True
    return batch_labels(batch), False


def inputs_of(batch: Batch) -> Any:
    """Return the main input of a batch: the first of a tuple, `input_ids` or the first non-label of a mapping.

    For an object it is the object itself, which is what the model receives.
    """
    kind = kind_of(batch)
    if kind == "tuple":
        return batch[0] if batch else None
    if kind == "mapping":
        if "input_ids" in batch:
            return batch["input_ids"]
        return next((batch[key] for key in batch if key not in LABEL_KEYS and key not in SETTING_KEYS), None)
    return batch


def padding_mask_of(batch: Batch) -> Tensor | None:
    """Return the (B, L) mask of real positions, aligned with the labels of `targets_of`, or None.

    Attention masks of other shapes, such as (B, 1, L, L), do not describe padding and are ignored.
    """
    if kind_of(batch) != "mapping":
        return None
    mask = next((batch[key] for key in ("attention_mask", "attn_mask") if key in batch), None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return mask[:, 1:] if is_next_token(batch) else mask


def is_next_token(keys: Collection[str]) -> bool:
    """Whether a mapping with these keys is a next-token batch: `tokens` are both inputs and targets."""
    return "tokens" in keys and "input_ids" not in keys and not any(key in keys for key in LABEL_KEYS)


# ------------------------------------------------------------------------------------------------ traversal


Own = tuple[str, Callable[[Any], Any]]
"""The name of a method, and the function applied to an object that has it."""


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor], own: Own | None = None) -> Batch:
    """Apply `function` to every tensor of a batch and keep its structure.

    Objects with the method named by `own` are passed to the function of `own` instead; other objects are returned
    unchanged. A read-only mapping that is not a dict becomes a dict.

    >>> map_tensors({"x": torch.ones(2)}, lambda t: t + 1)
    {'x': tensor([2., 2.])}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if own is not None and callable(getattr(type(batch), own[0], None)):
        return own[1](batch)
    parts = parts_of(batch)
    if parts is None:
        return batch
    return with_parts(batch, {key: map_tensors(value, function, own) for key, value in parts.items()})


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor to `device`, without blocking from pinned memory. Objects with `.to` move themselves."""

    def move(batch: Any) -> Any:
        if moves_without_waiting(batch):
            return batch.to(device, non_blocking=device.type == "cuda")
        return batch.to(device)

    with span("transfer"):
        return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), ("to", move))


def in_pinned_memory(batch: Batch) -> Batch:
    """Copy every CPU tensor to pinned memory. Objects with `.pin_memory` do it themselves."""
    return map_tensors(
        batch,
        lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor,
        ("pin_memory", lambda batch: batch.pin_memory()),
    )


def hand_out_parts(whole: Tensor) -> Tensor:
    """Mark a tensor of which batches are slices and which is not modified afterwards; return it.

    >>> came_together(hand_out_parts(torch.zeros(4))[2:]), came_together(torch.zeros(4)[2:])
    (True, False)
    """
    whole.has_batches = True  # type: ignore[attr-defined]
    return whole


def came_together(part: Tensor) -> bool:
    """Whether a tensor is a slice of one that was passed to `hand_out_parts`."""
    return getattr(part._base, "has_batches", False)


def tensors_in(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch in order; for an object with `.to`, those among its attributes."""
    return _tensors_in(batch, set())


def _tensors_in(batch: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
        return
    parts = parts_of(batch)
    if parts is None and kind_of(batch) == "object" and id(batch) not in seen:
        seen.add(id(batch))  # objects may refer to each other
        parts = dict(enumerate(batch)) if isinstance(batch, tuple) else getattr(batch, "__dict__", {})
    for value in (parts or {}).values():
        yield from _tensors_in(value, seen)


# ------------------------------------------------------------------------------------------------ counting


def num_samples(batch: Batch) -> int:
    """Return the number of samples in a batch; 1 if it is unknown, so that the batch counts as one.

    >>> num_samples({"input_ids": torch.zeros(4, 7)})
    4
    """
    count = count_samples(batch)
    return 1 if count is None else count


def count_samples(batch: Batch) -> int | None:
    """Return the number of samples in a batch, or None if it is unknown.

    It is the length of the first tensor, or `num_graphs` or `batch_size` of an object. A list inside a batch, such as
    images of different sizes, has one sample per entry, unless the labels disagree.

    >>> images = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 7)]
    >>> count_samples((images, [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]))
    2
    >>> count_samples("words") is None
    True
    """
    if type(batch) in _PAIRS and batch and isinstance(batch[0], Tensor):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    kind, parts = kind_of(batch), parts_of(batch)
    if kind in ("object", "dataclass") and (count := _own_count(batch)) is not None:
        return count
    if parts is None:
        return None
    if isinstance(batch, JointBatch):
        return sum(num_samples(part) for part in batch)
    if kind == "tuple" and _are_samples(batch):
        return len(batch)
    for value in parts.values():
        is_list = not isinstance(value, Tensor) and kind_of(value) == "tuple"
        count = _count_list(value, batch_labels(batch)) if is_list else count_samples(value)
        if count is not None:
            return count
    return None


def _own_count(batch: Any) -> int | None:
    """Return the number of samples that an object reports about itself."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # always on the CPU, so reading it does not synchronise
    for name in ("num_graphs", "batch_size"):
        count = getattr(batch, name, None)
        if isinstance(count, tuple) and count:  # a tensordict: its leading dimensions
            count = count[0]
        if isinstance(count, int):
            return count
    return None


def _are_samples(values: Sequence[Any]) -> bool:
    """Whether these are several mappings with the same keys: one per sample."""
    if len(values) < 2 or any(isinstance(one, Tensor) or kind_of(one) != "mapping" for one in values):
        return False
    return all(one.keys() == values[0].keys() for one in values)


def _count_list(values: Sequence[Any], labels: Any) -> int | None:
    """Return the samples of a list inside a batch: its length, or the length of the inputs that it lists."""
    if isinstance(labels, Tensor) and labels.dim():
        return labels.shape[0]
    if not values or not all(isinstance(value, Tensor) for value in values):
        return count_samples(values)
    others = labels if isinstance(labels, (tuple, list)) and labels is not values else ()
    is_list = isinstance(values, list) if not others else not all(isinstance(one, Tensor) for one in others)
    lengths = {len(one) if one.dim() else 1 for one in (*values, *others) if isinstance(one, Tensor)}
    return len(values) if is_list or len(lengths) > 1 else lengths.pop()


def is_empty(batch: Batch) -> bool:
    """Whether a batch has tensors and all of them have zero samples; numbers belong to any batch.

    >>> import torch
    >>> is_empty({"x": torch.zeros(0, 3)}), is_empty({"x": torch.zeros(2, 3)}), is_empty(["words"])
    (True, False, False)
    """
    lengths = _lengths(batch)
    return next(lengths, 1) == 0 and not any(lengths)


def without_samples(batch: Batch) -> Batch:
    """Return a copy of a batch with zero samples, for a rank that gets nothing of a small last batch.

    Raises DataError for a batch that cannot be sliced.
    """
    nothing = map_tensors(batch, lambda tensor: tensor[:0] if tensor.dim() else tensor)
    if not is_empty(nothing):
        raise DataError(
            "the last batch of the epoch has fewer samples than there are processes, and a batch of type "
            f"{type(batch).__name__} cannot be sliced to zero samples; set drop_last to true or choose another "
            "batch_size"
        )
    return nothing


def _lengths(batch: Batch) -> Iterator[int]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch.shape[0]
    elif kind_of(batch) == "object":
        yield num_samples(batch)
    else:
        for value in (parts_of(batch) or {}).values():
            yield from _lengths(value)
