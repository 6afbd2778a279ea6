"""Checkpoints may come from anywhere: their contents are validated before use."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from etude.core.errors import CheckpointError, EtudeError
from etude.core.spelling import shorten

_SHOWN = 60
_CANNOT_LOAD = "cannot load"


def record_of(name: str, fields: dict[str, Any], *, total: bool = True) -> Any:
    """Return the type of a dict with exactly these keys; its values are not converted."""
    kind = TypedDict(name, fields, total=total)  # type: ignore[misc]
    config = {"extra": "forbid", "strict": True, "arbitrary_types_allowed": True}
    kind.__pydantic_config__ = config  # type: ignore[attr-defined]
    return kind


def check_kind(kind: Any, value: Any, part: str) -> None:
    """Raise CheckpointError with the part and the key, unless `value` has the type `kind`.

    >>> check_kind(dict[str, int], {"step": -5.5}, "clock")
    Traceback (most recent call last):
    etude.core.errors.CheckpointError: clock.step: Input should be a valid integer, found -5.5
    """
    from pydantic import ValidationError  # imported here, because only loading needs it

    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, (part, *first["loc"])))
        raise CheckpointError(f"{place}: {first['msg']}, found {_short(first['input'])}") from None


def is_kind(kind: Any, value: Any) -> bool:
    """Whether `check_kind` accepts a value: for optional states that another version may have saved."""
    try:
        check_kind(kind, value, "state")
    except CheckpointError:
        return False
    return True


def check_tensor(value: Any, like: Tensor, part: str) -> None:
    """Raise CheckpointError unless `value` is a tensor with the shape and dtype of `like`."""
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{part}: found {_short(value)}, expected a tensor")
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        found, expected = (f"{_dtype(one)} {tuple(one.shape)}" for one in (value, like))
        raise CheckpointError(f"{part}: found {found}, expected {expected}")


@contextmanager
def errors_of(place: Path | str, part: str = "") -> Iterator[None]:
    """Turn every error of the block into one CheckpointError that names the checkpoint and its part."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, EtudeError)
        if known and str(error).startswith(_CANNOT_LOAD):
            raise
        text = " ".join(str(error).split()) if known else " ".join(f"{type(error).__name__}: {error}".split())
        part = f"{part}: " if part and not text.startswith(part) else ""
        raise CheckpointError(f"{_CANNOT_LOAD} {place}: {part}{text[:1000]}") from error


def same_category(saved: torch.dtype, own: torch.dtype) -> bool:
    """Whether values of one dtype can be loaded as the other: floats as floats, otherwise only the same dtype."""
    return saved == own or (saved.is_floating_point and own.is_floating_point)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {_dtype(value)} tensor {tuple(value.shape)}"
    if isinstance(value, int) and abs(value) > 10**_SHOWN:  # Python refuses to format very long integers
        return "a very large number"
    return shorten(repr(value), _SHOWN)
