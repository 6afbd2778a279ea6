"""Taking apart and rebuilding the containers and objects that batches are made of."""

import copy
import dataclasses
import functools
import inspect
from collections import UserDict
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Kind = Literal["tuple", "mapping", "dataclass", "object", "value"]
"""`object`: only its own methods reach its tensors; `value`: an opaque value."""


def kind_of(batch: Any) -> Kind:
    """Return the kind of container a batch is, in a way that torch.compile can trace.

    >>> kind_of({}), kind_of([]), kind_of("words")
    ('mapping', 'tuple', 'value')
    """
    if isinstance(batch, (tuple, list)):
        return "object" if isinstance(batch, PackedSequence) else "tuple"
    if isinstance(batch, (dict, UserDict)):
        return "mapping"
    if isinstance(batch, Tensor) or callable(getattr(type(batch), "to", None)):
        return "object"
    if isinstance(batch, Mapping):
        return "mapping"
    return "dataclass" if dataclasses.is_dataclass(batch) else "value"


def parts_of(batch: Any) -> dict[Any, Any] | None:
    """Return the values inside a batch by index, key or attribute; None if it cannot be taken apart.

    >>> parts_of([7, 8]), parts_of("words")
    ({0: 7, 1: 8}, None)
    """
    match kind_of(batch):
        case "tuple":
            return dict(enumerate(batch))
        case "mapping":
            return {**batch}
        case "dataclass":
            names = [field.name for field in dataclasses.fields(batch)]
            return {name: getattr(batch, name) for name in names} | getattr(batch, "__dict__", {})
    return None


def with_parts(batch: Any, parts: dict[Any, Any]) -> Any:
    """Return a batch of the same structure with other values; a read-only mapping becomes a dict."""
    if isinstance(batch, (tuple, list)):
        return getattr(batch, "_make", type(batch))(parts.values())
    if type(batch) is dict or (isinstance(batch, Mapping) and not isinstance(batch, (dict, UserDict))):
        return parts
    try:
        result = copy.copy(batch)
        for key, value in parts.items():
            if dataclasses.is_dataclass(batch):
                object.__setattr__(result, key, value)  # it may be frozen, and `__init__` must not run again
            else:
                result[key] = value
    except Exception:  # a user-defined mapping, which may restrict assignment
        return parts
    return result


def moves_without_waiting(batch: Any) -> bool:
    """Return whether the method `to` of an object takes `non_blocking`."""
    return isinstance(batch, PackedSequence) or _takes_non_blocking(type(batch).to)


@functools.cache
def _takes_non_blocking(method: Any) -> bool:
    try:
        return "non_blocking" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
