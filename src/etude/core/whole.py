"""Whole numbers that a user gives."""

import operator
from typing import Any

from etude.core.errors import ConfigError, EtudeError


def as_whole(name: str, value: Any, *, least: int, error: type[EtudeError] = ConfigError) -> int:
    """Return `value` as an int; raise `error` unless it is a whole number of at least `least`.

    >>> as_whole("batch_size", 8, least=1)
    8
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least:
        raise error(f"{name} is {value!r:.60}; it must be a whole number of at least {least}")
    return count
