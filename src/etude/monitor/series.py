"""The metrics of a run as curves: values by step, time, epoch, samples or tokens, and fewer points for a picture."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from etude.core.errors import ConfigError
from etude.core.spelling import shorten, suggest
from etude.monitor.columns import Array, Columns, read_columns
from etude.monitor.jsonl import NONFINITE
from etude.monitor.reading import EVENTS, METRICS, Follower

Axis = Literal["step", "time", "epoch", "samples", "tokens"]

SPLITS = ("train", "val", "epoch")
"""Kinds of records, in the order in which a metric is searched."""
_PLACES = frozenset({"step", "epoch", "split", "time", NONFINITE})


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of a run; `y` is NaN where the value was not finite."""

    name: str
    x: Array
    y: Array


@dataclass(frozen=True, slots=True)
class Buckets:
    """A series with few points: smallest, largest and last value of each bucket, and the last x there."""

    x: Array
    low: Array
    high: Array
    last: Array


class RunMetrics:
    """All metrics of a run folder, as they are now; it reads the whole file."""

    def __init__(self, run: str | Path) -> None:
        self.path = Path(run)
        known = read_columns(self.path / METRICS)
        self._columns = {split: known.get(split) or Columns() for split in SPLITS}
        self.events = read_all(self.path / EVENTS)

    def names(self, *splits: str) -> list[str]:
        """Return the names of the metrics, in the order of their first record."""
        names = dict.fromkeys(name for split in splits or SPLITS for name in self._columns[split].names)
        return [name for name in names if name not in _PLACES]

    def series(self, name: str, x: str = "step", split: str | None = None) -> Series:
        """Return a metric: of log points, or else of validations or of epochs, unless a split is named.

        Raises ConfigError for an unknown metric or axis, and for an axis that the run did not record.
        """
        if x not in get_args(Axis):
            raise ConfigError(f"unknown axis '{shorten(x)}'; there are: {', '.join(get_args(Axis))}")
        for one in SPLITS if split is None else (split,):
            columns = self._columns[one]
            if name in columns.names:
                values = columns.column(name)
                kept = ~np.isnan(values)
                return Series(name, self._places(columns, x)[kept], _finite(values[kept]))
        raise ConfigError(f"{self.path}: no metric '{shorten(name)}'{suggest(name, self.names())}")

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch, if known."""
        known = [event["steps_per_epoch"] for event in self.events if _is_count(event.get("steps_per_epoch"))]
        return known[-1] if known else None

    @cached_property
    def pauses(self) -> list[tuple[float, float]]:
        """When the run was resumed, and for how many seconds it had not been running."""
        events = [(event["time"], event.get("kind")) for event in self.events if _is_number(event.get("time"))]
        resumes = sorted(now for now, kind in events if kind == "resume")
        others = [columns.column("time") for columns in self._columns.values()]
        others.append(np.array([now for now, kind in events if kind != "resume"], np.float64))
        times = np.sort(np.concatenate(others))
        times = times[np.isfinite(times)]
        found = list[tuple[float, float]]()
        for number, now in enumerate(resumes):
            before = [*times[: np.searchsorted(times, now, side="right")][-1:], *resumes[max(0, number - 1) : number]]
            if before:
                found.append((now, now - float(max(before))))
        return found

    @cached_property
    def began(self) -> float:
        """When the run began, in seconds since 1970."""
        times = [float(event["time"]) for event in self.events[:1] if _is_number(event.get("time"))]
        times += [float(one) for columns in self._columns.values() for one in columns.column("time")[:1]]
        return min((one for one in times if math.isfinite(one)), default=0.0)

    def _places(self, columns: Columns, x: str) -> Array:
        steps = _finite(columns.column("step"))
        if x == "time":
            return self.elapsed(_finite(columns.column("time")))
        if x == "epoch":
            return steps / self.steps_per_epoch if self.steps_per_epoch else _finite(columns.column("epoch")) + 1
        if x == "step":
            return steps
        counts, places = (self._columns["train"].column(name) for name in (x, "step"))
        known = np.isfinite(counts) & np.isfinite(places)
        if not known.any():
            raise ConfigError(f"{self.path}: the run did not record its {x}; choose another --x, such as step")
        return np.asarray(np.interp(steps, places[known], counts[known]))

    def elapsed(self, times: Array) -> Array:
        """Return the seconds since the start at which the run was at these times, without pauses."""
        paused = np.zeros_like(times)
        for when, seconds in self.pauses:
            paused += np.where(times >= when, seconds, 0.0)
        return times - self.began - paused


def read_all(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON lines that may still be written."""
    follower, records = Follower(path), list[dict[str, Any]]()
    before = -1
    while follower.offset != before:  # a part may hold no record
        before = follower.offset
        records += follower.read()
    return records


def downsample(x: Array, y: Array, count: int) -> Buckets:
    """Return at most `count` buckets of equal width in x; a spike stays, as the low or high of its bucket.

    A bucket without a finite value is NaN. Few points stay as they are, in their order.

    >>> found = downsample(np.arange(6.0), np.array([1.0, 9.0, 2.0, 3.0, 0.0, 4.0]), 2)
    >>> found.low.tolist(), found.high.tolist(), found.last.tolist(), found.x.tolist()
    ([1.0, 0.0], [9.0, 4.0], [2.0, 4.0], [2.0, 5.0])
    """
    keep = np.isfinite(x)
    x, y = x[keep], y[keep]
    if len(x) <= count:
        return Buckets(x, y, y, y)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    which = np.minimum((share_of(x, x[0], x[-1]) * count).astype(np.int64), count - 1)
    starts = np.flatnonzero(np.diff(which, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    low = np.minimum.reduceat(np.where(np.isnan(y), np.inf, y), starts)
    high = np.maximum.reduceat(np.where(np.isnan(y), -np.inf, y), starts)
    positions = np.maximum.accumulate(np.where(np.isnan(y), -1, np.arange(len(y))))[ends]
    known = positions >= starts
    return Buckets(
        x[ends],
        np.where(known, low, np.nan),
        np.where(known, high, np.nan),
        np.where(known, y[np.maximum(positions, 0)], np.nan),
    )


def share_of(values: Array, low: float, high: float) -> Array:
    """Return where values are between two others, from 0 to 1; the middle if both are equal.

    >>> share_of(np.array([2.0, 3.0, 4.0]), 2.0, 4.0).tolist()
    [0.0, 0.5, 1.0]
    """
    half = high / 2 - low / 2  # the whole difference may overflow
    return (values / 2 - low / 2) / half if half > 0 else np.where(np.isnan(values), np.nan, 0.5)


def smoothed(y: Array, weight: float) -> Array:
    """Return the exponential moving average with this weight (0 changes nothing), without bias at its beginning.

    Values that are not finite do not count, and stay as they are.

    >>> smoothed(np.array([1.0, np.nan, 3.0]), 0.5).round(3).tolist()
    [1.0, nan, 2.333]
    """
    found = np.array(y, dtype=np.float64)
    if weight == 0:
        return found
    index, total, mass = np.flatnonzero(np.isfinite(y)), 0.0, 0.0
    averages = list[float]()
    for value in found[index].tolist():  # floats of Python: several times as fast as elements of an array
        total, mass = weight * total + (1 - weight) * value, weight * mass + 1 - weight
        averages.append(total / mass)
    found[index] = averages
    return found


def _finite(values: Array) -> Array:
    """Return the values with NaN for those that are not finite."""
    return np.where(np.isfinite(values), values, np.nan)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
