"""The metrics of one run for charts: read in parts, sampled while that lasts, and read again where one zooms in."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.dashboard.blocks import LEAST_BLOCKS, MOST_BLOCKS, Array, Blocks, Points
from etude.dashboard.parsing import EPOCH, NUM_AXES, SAMPLES, STEP, TIME, TOKENS, Place, columns, parse
from etude.monitor.reading import METRICS, Follower

AXES = {"step": STEP, "samples": SAMPLES, "tokens": TOKENS, "time": TIME, "epoch": EPOCH, "flops": TOKENS}
PART_BYTES = 1 << 20
"""Bytes that are parsed at once; between two parts other threads may run."""
RAW_BYTES = 16 << 20
"""Bytes that are read again if one zooms in to where blocks are too coarse."""
MOST_RUN_BYTES = 64 << 20
"""Memory of one run, above which its blocks are merged."""
MOST_SPLITS = 16
AGAIN_S = 5.0
"""Seconds after which a file without new whole lines is read again, even if its size is the same."""
WINDOW_BYTES = 4096
FLOPS_PER_TOKEN = 6
"""Floating-point operations for a token and parameter: two forward, four backward."""


@dataclass(slots=True)
class Facts:
    """What a run says at its start, which charts need."""

    resumes: Sequence[float] = ()
    """When it was continued."""
    steps_per_epoch: int | None = None
    parameters: int | None = None


class _Mark(NamedTuple):
    offset: int
    place: Place


class _Zoom(NamedTuple):
    """Records of a range of the file, every one of them."""

    start: int
    end: int
    splits: dict[str, Blocks]


class RunSeries:
    """Follows metrics.jsonl of one run. All methods may be called by several threads."""

    def __init__(self, run: Path, facts: Callable[[], Facts]) -> None:
        self.path = run / METRICS
        self._read_facts = facts
        self.lock = threading.RLock()
        self._follower = Follower(self.path)
        self._start()

    def _start(self) -> None:
        self.facts = self._read_facts()
        """Of the run's starts."""
        self.splits: dict[str, Blocks] = {}
        self.place = Place()
        self._marks: list[_Mark] = [_Mark(0, self.place)]
        self._sample: tuple[int, dict[str, Blocks]] | None = None
        self._zoom: _Zoom | None = None
        self._restarts = self._follower.restarts
        self._no_line_at: tuple[tuple[int, ...], float] = ((), 0.0)

    @property
    def cursor(self) -> int:
        """Bytes of the file that have been read."""
        return self._follower.offset

    @property
    def restarts(self) -> int:
        """How often the file was replaced, as a resumed run does."""
        return self._restarts

    @property
    def file(self) -> tuple[int, int] | None:
        """Device and inode of the file that was read."""
        return self._follower.file

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        groups = [self.splits, self._sample[1] if self._sample else {}, self._zoom.splits if self._zoom else {}]
        return sum(blocks.num_bytes for group in groups for blocks in group.values())

    @property
    def left_bytes(self) -> int:
        """Bytes of the file that have not been read; a line that is being written counts as well."""
        try:
            facts = self.path.stat()
        except OSError:
            return 0
        if _identity(facts) == self._no_line_at[0] and time.monotonic() - self._no_line_at[1] < AGAIN_S:
            return 0  # a long line is being written, or the file cannot be read
        is_other = self.file not in (None, (facts.st_dev, facts.st_ino)) or facts.st_size < self.cursor
        return facts.st_size if is_other else facts.st_size - self.cursor

    def advance(self, most_bytes: int = PART_BYTES) -> bool:
        """Read the next lines; return False if there are none."""
        with self.lock:
            offset = self._follower.offset
            lines = self._follower.lines(most_bytes)
            if self._follower.restarts != self._restarts:
                self._start()
                offset = 0
            if not lines:
                if self._follower.offset != offset:  # a line that is too long was skipped
                    return True
                self._sample = None
                with contextlib.suppress(OSError):
                    self._no_line_at = (_identity(self.path.stat()), time.monotonic())
                return False
            self.facts = self._read_facts()  # a resume is written after the file has been replaced
            if offset - self._marks[-1].offset >= PART_BYTES:
                self._marks.append(_Mark(offset, self.place))
            self.place = _add(self.splits, lines, self.place, self.facts.resumes)
            while self.num_bytes > MOST_RUN_BYTES and self.merge():
                pass
            if self._sample is not None and self.left_bytes < PART_BYTES:
                self._sample = None
            return True

    def merge(self) -> bool:
        """Halve the memory of the longest split; return False if it is short already."""
        with self.lock:
            self._zoom = None
            blocks = max(self.splits.values(), key=lambda one: one.num_bytes, default=None)
            if blocks is None or blocks.most <= LEAST_BLOCKS:
                return False
            blocks.most //= 2
            blocks.merge()
            return True

    def sample(self, windows: int) -> None:
        """Read some lines from all over the file, for an answer before all of it has been read."""
        with self.lock:
            if self._sample is not None and self._sample[0] >= windows:
                return
            splits: dict[str, Blocks] = {}
            _add(splits, _sampled_lines(self.path, windows), Place(), self.facts.resumes)
            self._sample = (windows, splits)

    def answer(
        self, split: str, name: str, axis: str, start: float | None, end: float | None, pixels: int
    ) -> dict[str, Any]:
        """Return the points of a metric for a chart of this width."""
        with self.lock:
            exact, splits = self.is_exact, self._known
            found = self._points(splits, split, name, axis).between(start, end)
            if exact and len(found.x) < pixels and splits.get(split, Blocks(1)).per_block > 1:
                found = self._zoomed(split, name, axis, start, end, found)
            found = found.bucketed(pixels)
            total = splits[split].total.get(name, 0) if split in splits else 0
            cursor = self.cursor
        return {
            "name": name,
            "split": split,
            "x": found.x,
            "min": found.low,
            "max": found.high,
            "last": found.last,
            "nonfinite": found.x[found.bad],
            "count": len(found.x),
            "total": total,
            "exact": exact,
            "cursor": cursor,
        }

    @property
    def is_exact(self) -> bool:
        """Whether answers come from all records, not from a sample."""
        return self._sample is None

    @property
    def _known(self) -> dict[str, Blocks]:
        return self.splits if self._sample is None else self._sample[1]

    def names(self, split: str) -> list[str]:
        """Return the metrics of a split that have been read."""
        with self.lock:
            return self._known[split].names if split in self._known else []

    def points(self, split: str, name: str, axis: str) -> Points:
        """Return all points of a metric, several records in each if the run is long."""
        with self.lock:
            return self._points(self._known, split, name, axis)

    def ruler(self, axis: str, most: int = 1000) -> dict[str, Array]:
        """Return where steps are on an axis, at most `most` of them: events have steps only."""
        with self.lock:
            split = max(self._known.values(), key=lambda one: one.places.shape[1], default=Blocks(NUM_AXES))
            x = split.places
            kept = np.unique(np.linspace(0, max(0, x.shape[1] - 1), min(most, x.shape[1])).astype(int))
            places = self._axis(x, axis)[kept]
            is_known = np.isfinite(places)
            return {"steps": x[STEP][kept][is_known], "x": places[is_known]}

    def elapsed(self, time: float) -> float:
        """Return the place on the time axis of a record that is newer than the last resume."""
        with self.lock:
            known = self.place.time == self.place.time
            return self.place.axes[TIME] + (time - self.place.time) if known else 0.0

    def _points(self, splits: dict[str, Blocks], split: str, name: str, axis: str) -> Points:
        found = splits[split].points(name) if split in splits else Blocks(NUM_AXES).points(name)
        return found.placed(self._axis(found.x, axis))

    def _axis(self, x: Array, axis: str) -> Array:
        found: Array = x[AXES[axis]]
        if axis == "epoch" and self.facts.steps_per_epoch:
            found = x[STEP] / self.facts.steps_per_epoch
        if axis == "flops":
            found = found * (FLOPS_PER_TOKEN * (self.facts.parameters or float("nan")))
        return found

    def _zoomed(
        self, split: str, name: str, axis: str, start: float | None, end: float | None, coarse: Points
    ) -> Points:
        """Return every record of the range, if it is short enough to be read again."""
        if start is None and end is None:
            return coarse
        x = self._axis(np.array([mark.place.axes for mark in self._marks]).T, axis)
        if not (np.isfinite(x[1:]).all() and (np.diff(x[1:]) >= 0).all()):
            return coarse
        x[0] = -np.inf
        first = 0 if start is None else max(0, int(np.searchsorted(x, start)) - 2)
        after = len(x) if end is None else int(np.searchsorted(x, end, side="right")) + 1
        stop = self._marks[after].offset if after < len(x) else self.cursor
        begin = self._marks[first]
        if stop - begin.offset > RAW_BYTES:
            return coarse
        zoom = self._zoom
        if zoom is None or not (zoom.start <= begin.offset and stop <= zoom.end):
            zoom = self._zoom = _Zoom(begin.offset, stop, {})
            data = _read(self.path, begin.offset, stop)
            _add(zoom.splits, data, begin.place, self.facts.resumes, most=1 << 40)
        return self._points(zoom.splits, split, name, axis).between(start, end)


def _add(
    splits: dict[str, Blocks], lines: bytes, place: Place, resumes: Sequence[float], most: int | None = None
) -> Place:
    """Add lines to the blocks of their splits; return where they end."""
    parts, place = columns(parse(lines), place, resumes)
    for split, part in parts.items():
        if split not in splits:
            if len(splits) >= MOST_SPLITS:
                continue
            splits[split] = Blocks(NUM_AXES, most or MOST_BLOCKS)
        splits[split].add(part.x, part.names, part.values)
    return place


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def _read(path: Path, start: int, end: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
    except OSError:
        return b""


def _sampled_lines(path: Path, windows: int) -> bytes:
    """Return whole lines from evenly spaced places of a file, its first and last among them."""
    found: list[bytes] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            windows = max(1, min(windows, size // (4 * WINDOW_BYTES)))  # else all of it could be read
            for start in np.linspace(0, max(0, size - WINDOW_BYTES), windows).astype(np.int64).tolist():
                file.seek(start)
                data = file.read(WINDOW_BYTES)
                first = data.find(b"\n") + 1 if start else 0
                found.append(data[first : data.rfind(b"\n") + 1])
    except OSError:
        pass
    return b"".join(found)
