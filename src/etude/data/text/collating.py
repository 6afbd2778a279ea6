"""Collating samples: sequences of different lengths are padded, everything else is stacked."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.data.order.permutation import Indices
from etude.data.text.padding import IGNORED, Array, check_multiple, filled, padded_width, scatter

MASKS = {"input_ids": "attention_mask", "tokens": "attn_mask"}
"""Keys of token ids, and of the corresponding mask."""
LABEL_NAMES = ("labels", "label", "targets", "target")


def collate(samples: Sequence[Any], pad_id: int = 0, pad_multiple: int = 1) -> dict[str, Any]:
    """Return a batch of samples, padded on the right, with an attention mask: 1 for tokens and 0 for padding.

    A sample is a `Sample` or tuple (ids, mask, labels), a tuple (ids, labels), a mapping with `input_ids` or `tokens`,
    or the ids alone. Values with one entry per token are padded to the longest of the batch, rounded up to
    `pad_multiple`: ids with `pad_id`, labels with -100, others with 0. Everything else must have equal shapes and is
    stacked; strings come as a list. Use it as `collate_fn` of any loader, with `functools.partial` for arguments.

    >>> batch = collate([[5, 6, 7], [8]])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]])

    Raises DataError if samples are of different kinds or do not fit together.
    """
    check_multiple(pad_multiple)
    columns = _columns(samples)
    ids = next((name for name in MASKS if name in columns), None)
    if ids is None:
        return {name: _stacked(name, values) for name, values in columns.items()}
    tokens = [_array(ids, value) for value in columns[ids]]
    if any(value.ndim != 1 for value in tokens):
        raise DataError(f"{ids} of a sample has shape {_shapes(tokens, 1)}; it must have one dimension")
    lengths = np.array([len(value) for value in tokens])
    mask = filled(lengths, padded_width(int(lengths.max()), pad_multiple))
    batch: dict[str, Any] = {}
    for name, values in columns.items():
        fill = pad_id if name == ids else IGNORED if name in LABEL_NAMES else 0
        if isinstance(values[0], (str, bytes)):
            batch[name] = list(values)
            continue
        arrays = tokens if name == ids else [_array(name, value) for value in values]
        if _per_token(arrays, lengths):
            batch[name] = torch.from_numpy(scatter(np.concatenate(arrays), mask, fill))
        else:
            batch[name] = _stacked(name, arrays)
    if MASKS[ids] not in batch:
        batch[MASKS[ids]] = torch.from_numpy(mask.astype(np.int64))
    return batch


def _columns(samples: Sequence[Any]) -> dict[str, list[Any]]:
    """The values of all samples by name."""
    if not len(samples):
        raise DataError("there are no samples to collate")
    first = samples[0]
    if isinstance(first, Mapping):
        keys = list(first)
        if any(not isinstance(sample, Mapping) or sample.keys() != first.keys() for sample in samples):
            raise DataError(f"samples have different keys; the first one has {', '.join(map(str, keys))}")
        return {str(key): [sample[key] for sample in samples] for key in keys}
    if isinstance(first, tuple):
        names = {2: ("input_ids", "labels"), 3: ("input_ids", "attention_mask", "labels")}.get(len(first))
        if names is None or any(not isinstance(sample, tuple) or len(sample) != len(first) for sample in samples):
            raise DataError("tuple samples must all be (ids, labels) or all (ids, mask, labels)")
        return {name: list(values) for name, values in zip(names, zip(*samples, strict=True), strict=True)}
    return {"input_ids": list(samples)}


def _array(name: str, value: Any) -> Array:
    try:
        array = value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} of a sample cannot be converted to an array: {error}") from error
    if array.dtype.kind not in "iufb":
        raise DataError(f"{name} of a sample is {type(value).__name__}; return numbers, an array or a tensor")
    if isinstance(value, (float, list, tuple)) and array.dtype == np.float64:
        return array.astype(np.float32)
    return array


def _per_token(arrays: list[Array], lengths: Indices) -> bool:
    return all(array.ndim > 0 for array in arrays) and [len(array) for array in arrays] == lengths.tolist()


def _stacked(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], (str, bytes)):
        return list(values)
    arrays = [_array(name, value) for value in values]
    if any(array.shape != arrays[0].shape for array in arrays):
        raise DataError(
            f"{name} has different shapes ({_shapes(arrays, 3)} …) that differ from those of the token ids; return "
            "one entry per token, or equal shapes"
        )
    result = np.stack(arrays)
    # Labels are int64 in torch; images keep uint8. Torch supports other unsigned types poorly.
    if result.dtype.kind in "iu" and (
        result.ndim == 1 or result.dtype.kind + str(result.itemsize) in ("u2", "u4", "u8")
    ):
        result = result.astype(np.int64)
    return torch.from_numpy(result)


def _shapes(arrays: list[Array], limit: int) -> str:
    return ", ".join(str(shape) for shape in list(dict.fromkeys(array.shape for array in arrays))[:limit])
