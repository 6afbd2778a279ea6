"""Validation of arguments passed in Python: integers, devices, and the ranges stated in annotations."""

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from annotated_types import Ge, Gt, Le, Lt

from etude.core.errors import ConfigError, EtudeError
from etude.core.spelling import shorten

P = ParamSpec("P")
R = TypeVar("R")


def as_whole(name: str, value: Any, *, least: int, error: type[EtudeError] = ConfigError) -> int:
    """Return `value` as an int; raise `error` unless it is an integer of at least `least`.

    >>> as_whole("batch_size", 8, least=1)
    8
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        raise error(f"{name} is {value!r:.60}; it must be an integer of at least {least}")
    return count


def as_device(device: torch.device | str | int) -> torch.device:
    """Return the device of that name; `auto` is CUDA if available, else CPU. Raises ConfigError for an unknown name.

    >>> as_device("cpu")
    device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    # torch raises ValueError for an index that does not fit in 8 bits
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device {shorten(str(device))!r} is not known to torch; use cpu, cuda or cuda:N"
        ) from error


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of each call against the `Annotated` ranges and `Literal` values of the signature.

    Raises ConfigError with the argument, its value and what is allowed. Types are left to mypy and to the config
    parser.

    >>> from typing import Annotated
    >>> from annotated_types import Gt
    >>> @checked
    ... def halve(size: Annotated[int, Gt(0)]) -> float:
    ...     return size / 2
    >>> halve(-1)
    Traceback (most recent call last):
    etude.core.errors.ConfigError: halve: size is -1; it must be above 0
    """
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    ranged = {name: hint for name, hint in hints.items() if any(_annotations(hint))}

    @functools.wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # let Python raise its own TypeError, which names the function
        owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
        for name, value in given.items():
            if name in ranged:
                _check(f"{owner}: {name}", value, ranged[name])
        return function(*args, **kwargs)

    return checking


def _check(what: str, value: Any, hint: Any) -> None:
    origin, args = get_origin(hint), get_args(hint)
    if value is None:  # whether it may be is a matter of types
        return
    if origin is Annotated:
        _check_bounds(what, value, [] if isinstance(value, (tuple, list)) else list(_bounds(args[1:])))
        _check(what, value, args[0])
    elif origin is Literal:
        if value not in args:
            raise ConfigError(f"{what} is {value!r:.60}; it must be {' or '.join(map(repr, args))}")
    elif origin in (Union, types.UnionType):
        for arg in args:
            if get_origin(arg) is not Literal:  # another member may fit
                _check(what, value, arg)
    elif args and isinstance(value, (tuple, list)):
        for place, item in enumerate(value):
            _check(f"{what}[{place}]", item, args[min(place, len(args) - 1)])


def _check_bounds(what: str, value: Any, bounds: list[tuple[Callable[[Any, Any], bool], Any, str]]) -> None:
    if bounds and (isinstance(value, str) or not all(holds(value, limit) for holds, limit, _ in bounds)):
        allowed = " and ".join(f"{words} {limit}" for _, limit, words in bounds)
        kind = "a number " if isinstance(value, str) else ""
        raise ConfigError(f"{what} is {repr(value) if kind else value}; it must be {kind}{allowed}")
    if bounds and isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{what} is {value}; it must be finite")


def _bounds(metadata: tuple[Any, ...]) -> Iterator[tuple[Callable[[Any, Any], bool], Any, str]]:
    """Yield comparison, limit and description of each bound; other metadata (sections, documentation) has none."""
    for bound in metadata:
        match bound:
            case Gt(limit):
                yield operator.gt, limit, "above"
            case Ge(limit):
                yield operator.ge, limit, "at least"
            case Lt(limit):
                yield operator.lt, limit, "below"
            case Le(limit):
                yield operator.le, limit, "at most"


def _annotations(hint: Any) -> Iterator[Any]:
    """Yield every `Annotated` and `Literal` inside a type hint."""
    if get_origin(hint) in (Annotated, Literal):
        yield hint
    for arg in get_args(hint):
        if not isinstance(arg, (str, int)):
            yield from _annotations(arg)
