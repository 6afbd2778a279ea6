"""Lines of metrics.jsonl as columns of numbers, with the axes of charts: step, samples, tokens, epoch, time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from etude.dashboard.blocks import Array
from etude.monitor.columns import by_split, table_of
from etude.monitor.jsonl import NONFINITE, decode

STEP, EPOCH, TIME, SAMPLES, TOKENS = range(5)
"""Rows of axes. TIME is in seconds since the first record, without the pauses before a resume."""
NUM_AXES = 5
_AXES = ("step", "epoch", "time", "samples", "tokens")
PLACE = frozenset(["step", "epoch", "split", "time", "phase", NONFINITE])
"""Keys of a record that are not metrics."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reader of metrics.jsonl is: axes and clock of the last record."""

    time: float = float("nan")
    axes: tuple[float, ...] = (0.0, 0.0, 0.0, float("nan"), float("nan"))


@dataclass(slots=True)
class Part:
    """Records of one split as columns: NaN where a record lacks the name, infinity where its value is not finite."""

    x: Array
    names: list[str]
    values: Array


def parse(lines: bytes) -> list[dict[str, Any]]:
    """Return the records of whole lines; a line that holds none is skipped.

    >>> parse(b'{"step": 1}\\n{"st\\n{"step": 2, "loss": NaN}\\n')
    [{'step': 1}, {'step': 2, 'loss': None}]
    """
    try:
        records = orjson.loads(b"[" + lines.rstrip(b"\r\n").replace(b"\n", b",") + b"]")
    except orjson.JSONDecodeError:
        records = [parse_line(line) for line in lines.splitlines()]
    return [record for record in records if type(record) is dict]


def parse_line(line: bytes) -> Any:
    """Return the value of one line; None if it holds none."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN, integers of more than 64 bits, lone surrogates
        try:
            record = decode(line)
        except RecursionError:
            record = None
        return record and {name: None if one != one else one for name, one in record.items()}


def columns(
    records: Sequence[dict[str, Any]], place: Place, resumes: Sequence[float]
) -> tuple[dict[str, Part], Place]:
    """Return the records by split, and where they end; `resumes` are the times at which the run was continued."""
    indices = by_split(records)
    raw = np.full((NUM_AXES, len(records)), np.nan)
    parts: dict[str, Part] = {}
    for split, index in indices.items():
        some = records if len(index) == len(records) else [records[one] for one in index]
        names, values = table_of(some)
        for row, name in enumerate(_AXES):
            if name in names:
                raw[row, index] = values[names.index(name)]
        own = [row for row, name in enumerate(names) if name not in PLACE]
        parts[split] = Part(np.empty(0), [names[row] for row in own], values[own])
    kept = np.isfinite(raw[STEP])
    if not kept.any():
        return {}, place
    times, axes = _places(raw[:, kept], place, np.asarray(resumes, float))
    raw[:, kept] = axes
    for split, part in parts.items():
        own_kept = kept[indices[split]]
        part.x, part.values = raw[:, indices[split]][:, own_kept], part.values[:, own_kept]
    return {split: part for split, part in parts.items() if part.x.shape[1]}, Place(
        times[-1], tuple(axes[:, -1].tolist())
    )


def _places(raw: Array, place: Place, resumes: Array) -> tuple[Array, Array]:
    """Return times and axes of records, in the order of the file: what a record does not say is as before."""
    times = _filled(raw[TIME], place.time)
    before = np.array(place.axes)
    axes = np.stack([_filled(row, old) for row, old in zip(raw, before, strict=True)])
    axes[TIME] = _elapsed(times, place, resumes)
    return times, axes


def _elapsed(times: Array, place: Place, resumes: Array) -> Array:
    """Return seconds since the first record of the file: a resume continues where the last record was."""
    before = times[0] if np.isnan(place.time) else place.time
    all_times = np.concatenate([[before], times])
    passed = np.diff(all_times)
    if len(resumes):
        segment = np.searchsorted(resumes, all_times, side="right")
        is_new = np.diff(segment) > 0
        passed[is_new] = times[is_new] - resumes[segment[1:][is_new] - 1]
    passed = np.where(np.isfinite(passed), np.maximum(passed, 0.0), 0.0)
    return place.axes[TIME] + np.cumsum(passed)


def _filled(column: Array, before: float) -> Array:
    """Return a column with the last known value in place of missing ones."""
    known = np.isfinite(column)
    if known.all():
        return column
    index = np.maximum.accumulate(np.where(known, np.arange(len(column)), -1))
    return np.where(index >= 0, column[np.maximum(index, 0)], before)


def dumps(value: Any) -> bytes:
    """Return a value as JSON; NaN is null, what JSON does not know is text."""
    try:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        return bytes(orjson.dumps(value, default=_known, option=options))
    except TypeError:  # text that is not UTF-8, integers of more than 64 bits
        return json.dumps(_plain(value)).encode()


def _known(value: Any) -> Any:
    """Return what orjson knows of: arrays that are not contiguous as lists, other objects as text."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, (str, bool, int)) else str(value)
