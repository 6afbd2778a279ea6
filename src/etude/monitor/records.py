"""Records as lines of valid JSON, also when their numbers are not finite."""

import json
import math
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

NONFINITE = "nonfinite"
"""Key under which a record names those of its numbers that are not finite; they are written as null."""


def encode(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON.

    JSON has no NaN and no infinity: such numbers become null, and `nonfinite` names them.

    >>> encode({"step": 3, "loss": float("nan"), "lr": 0.1})
    '{"step": 3, "loss": null, "lr": 0.1, "nonfinite": ["loss"]}'
    """
    return json.dumps(plain(record), allow_nan=False)


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that is valid JSON: numbers of any library as Python's own, other objects as text."""
    nonfinite: list[str] = []
    result = {str(key): _plain(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        result[NONFINITE] = nonfinite
    return result


def decode(line: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line does not hold one.

    >>> decode('{"step": 3, "lo') is None
    True
    """
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file in order; lines that are not records (cut short) are passed over."""
    try:
        with path.open("rb") as file:
            yield from (record for line in file if (record := decode(line)) is not None)
    except FileNotFoundError:
        return


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        nonfinite.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}.{index}", nonfinite) for index, item in enumerate(value)]
    return str(value)
