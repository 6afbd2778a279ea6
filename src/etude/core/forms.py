"""How the objects that batches are made of are taken apart and put together: known once for every class."""

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Kind = Literal["tuple", "mapping", "dataclass", "object", "value"]
"""`object`: only its own methods reach its tensors; `value`: nothing is known of it."""


class Form(NamedTuple):
    """How objects of a class are taken apart and put together again."""

    kind: Kind
    methods: Mapping[str, bool]
    """Methods of its own, of `OWN_METHODS`, and whether each takes `non_blocking`."""
    names: Callable[[Any], Iterable[Any]] = tuple
    """Keys or attributes of an instance."""
    parts: Callable[[Any], Iterable[Any]] | None = None
    """Values of an instance; None if nobody may look inside."""
    rebuild: Callable[[Any, list[Any]], Any] | None = None
    """The same with other values."""


OWN_METHODS = ("to", "pin_memory")
_UNSET = object()
_FORMS: dict[type, Form] = {}


def class_form(kind: type) -> Form:
    """Return the form of a class, found once.

    >>> class_form(dict).kind, class_form(list).kind, class_form(PackedSequence).kind, class_form(str).kind
    ('mapping', 'tuple', 'object', 'value')
    """
    form = _FORMS.get(kind)
    if form is None:
        form = _FORMS[kind] = _find_form(kind)
    return form


def kind_of(batch: Any) -> Kind:
    """Return the kind of a batch's form, in a way that torch's compiler can follow."""
    if isinstance(batch, (tuple, list)):
        return "object" if isinstance(batch, PackedSequence) else "tuple"
    if isinstance(batch, (dict, UserDict)):
        return "mapping"
    return "object" if isinstance(batch, Tensor) else _class_kind(type(batch))


def _class_kind(kind: type) -> Kind:
    if issubclass(kind, (tuple, list)):
        return "object" if issubclass(kind, PackedSequence) else "tuple"
    if issubclass(kind, (dict, UserDict)):
        return "mapping"
    if callable(getattr(kind, "to", None)):
        return "object"
    if issubclass(kind, Mapping):
        return "mapping"
    return "dataclass" if dataclasses.is_dataclass(kind) else "value"


def _find_form(kind: type) -> Form:
    found = {name: getattr(kind, name, None) for name in OWN_METHODS}
    methods = {name: _takes_non_blocking(kind, method) for name, method in found.items() if callable(method)}
    match _class_kind(kind):
        case "tuple":
            make = getattr(kind, "_make", kind)
            return Form("tuple", methods, lambda _: (), iter, lambda _, values: make(values))
        case "mapping":
            rebuild = _like_dict if kind is not dict and issubclass(kind, (dict, UserDict)) else _dict
            return Form("mapping", methods, tuple, lambda batch: batch.values(), rebuild)
        case "dataclass":
            return Form("dataclass", methods, _attributes, lambda batch: _attributes(batch).values(), _like_dataclass)
        case other:
            return Form(other, methods)


def _takes_non_blocking(kind: type, method: Any) -> bool:
    try:
        return kind is PackedSequence or "non_blocking" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # built in, and silent about its arguments
        return False


def _dict(batch: Mapping[Any, Any], values: list[Any]) -> dict[Any, Any]:
    return dict(zip(batch, values, strict=True))


def _like_dict(batch: Any, values: list[Any]) -> Any:
    """Return a dict of the same class, or a plain one if the class does not allow that."""
    try:
        result = copy.copy(batch)
        for key, value in zip(batch, values, strict=True):
            result[key] = value
    except Exception:  # somebody's own class, with any rules
        return _dict(batch, values)
    return result


def _attributes(batch: Any) -> dict[str, Any]:
    """Return all that an instance of a dataclass has, fields or not."""
    fields = ((field.name, getattr(batch, field.name, _UNSET)) for field in dataclasses.fields(batch))
    return {name: value for name, value in fields if value is not _UNSET} | getattr(batch, "__dict__", {})


def _like_dataclass(batch: Any, values: list[Any]) -> Any:
    """Return a copy with other values, without running `__init__`; it may be frozen."""
    result = copy.copy(batch)
    for name, value in zip(_attributes(batch), values, strict=True):
        object.__setattr__(result, name, value)
    return result
