"""The metrics of all runs that are shown, in bounded memory; long files are read by a thread in the background."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etude.dashboard.series import PART_BYTES, Facts, RunSeries

logger = logging.getLogger("etude")

MOST_BYTES = 160 << 20
"""Memory for metrics: above it, blocks are merged, then the runs that were not asked for longest are dropped."""
PATIENCE_S = 0.3
"""Time that a request may take to read files; what is left is sampled, and read in the background."""
ALL_WINDOWS = 6400
SLICE_BYTES = 16 << 20
"""Bytes of a run that are read in the background before it is another one's turn."""


class Store:
    """Answers questions about metrics. `on_exact` is called with a run's id when all of its file has been read."""

    def __init__(self, on_exact: Callable[[str], None] = lambda _: None, most_bytes: int = MOST_BYTES) -> None:
        self.on_exact = on_exact
        self.most_bytes = most_bytes
        self._runs: OrderedDict[str, RunSeries] = OrderedDict()
        self._waiting: deque[str] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def get(self, key: str, path: Path, facts: Callable[[], Facts]) -> RunSeries:
        """Return the metrics of a run; nothing is read yet."""
        with self._change:
            series = self._runs.get(key)
            if series is None or series.path.parent != path:
                series = self._runs[key] = RunSeries(path, facts)
            self._runs.move_to_end(key)
            return series

    def known(self, key: str) -> RunSeries | None:
        """Return the metrics of a run if it has been asked for before."""
        with self._change:
            return self._runs.get(key)

    def drop(self, key: str) -> None:
        """Forget a run."""
        with self._change:
            self._runs.pop(key, None)

    def read(self, series: Sequence[tuple[str, RunSeries]], patience_s: float = PATIENCE_S) -> None:
        """Read what is new in some runs; those that take too long are sampled, and read in the background."""
        end = time.monotonic() + patience_s
        late: list[tuple[str, RunSeries]] = []
        for key, one in series:
            if one.left_bytes > SLICE_BYTES and len(series) > 1:
                late.append((key, one))
                continue
            while one.left_bytes and time.monotonic() < end and one.advance():
                pass
            if one.left_bytes > (PART_BYTES if one.cursor else 0):  # the stream brings the rest of a part
                late.append((key, one))
        for _, one in late:
            one.sample(max(16, min(200, ALL_WINDOWS // len(late))))
        self._queue([key for key, _ in late])
        self._limit()

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        with self._change:
            return sum(one.num_bytes for one in self._runs.values())

    def close(self) -> None:
        """End the thread."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _queue(self, keys: list[str]) -> None:
        """Read some runs in the background, before those that were asked for earlier."""
        with self._change:
            self._waiting = deque([*keys, *(key for key in self._waiting if key not in keys)])
            if keys and self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="etude-dashboard-reader", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                key = self._waiting.popleft()
                series = self._runs.get(key)
            if series is None:
                continue
            try:
                self._read_slice(key, series)
            except Exception:  # of one run; the others wait
                logger.exception(f"cannot read {series.path}")

    def _read_slice(self, key: str, series: RunSeries) -> None:
        start = series.cursor
        while not self._is_closed and series.cursor - start < SLICE_BYTES and series.advance():
            pass
        self._limit()
        if series.left_bytes > PART_BYTES and series.cursor != start:
            with self._change:  # after the others, whose turn it is
                self._waiting.append(key)
        else:
            self.on_exact(key)

    def _limit(self) -> None:
        with self._change:
            runs = list(self._runs.items())
        sizes: dict[str, Any] = {key: one.num_bytes for key, one in runs}
        while sum(sizes.values()) > self.most_bytes and sizes:
            key = max(sizes, key=sizes.__getitem__)
            series = dict(runs)[key]
            if series.merge():
                sizes[key] = series.num_bytes
            else:
                key = next(iter(sizes))
                self.drop(key)
                del sizes[key]
