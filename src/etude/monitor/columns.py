"""Records of metrics.jsonl as columns of numbers, which take a tenth of the memory."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from etude.monitor.jsonl import NONFINITE, decode
from etude.monitor.reading import Follower

Array = np.ndarray[Any, np.dtype[np.float64]]
PART_BYTES = 4 << 20
"""Bytes that are parsed at once."""
_TEXTS = frozenset(["split", NONFINITE])


class Columns:
    """Growing columns of the records of one split."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._tables: list[tuple[dict[str, int], Array]] = []

    @property
    def names(self) -> list[str]:
        """The names, in the order of their first record."""
        return list(self._names)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Add records."""
        names, values = table_of(records)
        self._names |= dict.fromkeys(names)
        self._tables.append(({name: row for row, name in enumerate(names)}, values))

    def column(self, name: str) -> Array:
        """Return a value for each record: NaN where it has none, infinity where it is not finite."""
        found = [
            values[rows[name]] if name in rows else np.full(values.shape[1], np.nan) for rows, values in self._tables
        ]
        return np.concatenate(found) if found else np.empty(0)


def read_columns(path: Path) -> dict[str, Columns]:
    """Return the records of a file of JSON lines, which may still be written, by split."""
    found: dict[str, Columns] = {}
    follower, before = Follower(path), -1
    while follower.offset != before:  # a part may hold no record
        before = follower.offset
        records = parse(follower.lines(PART_BYTES))
        for split, index in by_split(records).items():
            found.setdefault(split, Columns()).add([records[one] for one in index])
    return found


def parse(lines: bytes) -> list[dict[str, Any]]:
    """Return the records of whole lines; a line that holds none is skipped, and NaN is None.

    >>> parse(b'{"step": 1}\\n{"st\\n{"step": 2, "loss": NaN}\\n')
    [{'step': 1}, {'step': 2, 'loss': None}]
    """
    try:  # all at once is twice as fast as line by line
        records = json.loads(b"[" + lines.rstrip(b"\r\n").replace(b"\n", b",") + b"]", parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        records = [_parse_line(line) for line in lines.splitlines()]
    return [record for record in records if type(record) is dict]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = decode(line)
    except RecursionError:
        return None
    return record and {name: None if one != one else one for name, one in record.items()}


def by_split(records: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the indices of the records of each split."""
    splits = [record.get("split") for record in records]
    try:
        known = dict.fromkeys(splits)
    except TypeError:  # a list
        known = {None: None}
    if not all(isinstance(split, str) for split in known):
        splits = [split if isinstance(split, str) else "train" for split in splits]
    return {
        split: [number for number, one in enumerate(splits) if one == split]
        for split in map(str, dict.fromkeys(splits))
    }


def table_of(records: Sequence[dict[str, Any]]) -> tuple[list[str], Array]:
    """Return the names in some records, and their values (names, records); text and other objects are left out."""
    first = records[0]
    names = [name for name, one in first.items() if type(one) is float or type(one) is int]
    is_uniform = len(names) > 1 and sum(map(len, records)) == len(first) * len(records)
    if is_uniform and len(names) + len(_TEXTS & first.keys()) == len(first):
        try:
            values = np.array(list(map(itemgetter(*names), records)), np.float64).T
            if not np.isnan(values).any():  # null would be NaN as well
                return names, values
        except (KeyError, TypeError, ValueError, OverflowError):
            pass
    every = [name for name in dict.fromkeys(chain.from_iterable(records)) if name not in _TEXTS]
    found = {name: column for name in every if not np.isnan(column := _numbers(records, name)).all()}
    return list(found), np.stack(list(found.values())) if found else np.empty((0, len(records)))


def _numbers(records: Iterable[dict[str, Any]], name: str) -> Array:
    nothing = float("nan")
    column = [record.get(name, nothing) for record in records]
    if None not in column:
        try:
            return np.array(column, np.float64)
        except (TypeError, ValueError, OverflowError):
            pass
    return np.array([_number(value, nothing) for value in column], np.float64)


def _number(value: Any, nothing: float) -> float:
    if value is None:
        return float("inf")
    if isinstance(value, (int, float)) and value is not nothing:
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    return nothing
