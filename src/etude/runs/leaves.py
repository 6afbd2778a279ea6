"""Configs and environments as flat settings, and in what several of them differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
"""In place of a setting that a run does not have."""


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested data by dotted key; list items that have a name go by it, other lists are one value.

    >>> leaves({"training": {"epochs": 3}, "callbacks": [{"name": "ema", "decay": 0.9}], "sizes": [1, 2]})
    {'training.epochs': 3, 'callbacks.ema.decay': 0.9, 'sizes': '[1, 2]'}
    >>> leaves({"callbacks": [{"name": "csv"}]})
    {'callbacks.csv': True}
    """
    if isinstance(value, Mapping) and (value or not path):
        found: dict[str, Any] = {}
        for name, part in value.items():
            found |= leaves(part, f"{path}.{name}".strip("."))
        return found
    if (named := _by_name(value)) is not None:
        return leaves(named, path)
    is_container = isinstance(value, (list, Mapping))
    return {path: json.dumps(value, default=str) if is_container else value}


def _by_name(value: Any) -> dict[str, Any] | None:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(one, Mapping) and "name" in one for one in value)
    ):
        return None
    named = {str(one["name"]): {key: part for key, part in one.items() if key != "name"} or True for one in value}
    return named if len(named) == len(value) else None


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return what differs between flat configs: key and the value of each, `ABSENT` where it has none.

    >>> differences([{"a": 1, "b": 2, "c": None}, {"a": 1.0, "c": 3}])
    [('b', [2, '–']), ('c', [None, 3])]
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, ABSENT) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(map(_identity, values))) > 1]


def _identity(value: Any) -> Any:
    """Return what equal settings share: 1 is 1.0, but not true."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return ("number", value)
    return (type(value).__name__, str(value))
