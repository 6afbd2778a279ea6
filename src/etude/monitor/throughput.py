"""Samples per second, over the last window and since the start, with pauses left out."""

import time
from collections.abc import Callable


class Rate:
    """Measures how fast a counter grows. The time between `pause` and `resume` (validation, saving) does not count.

    >>> seconds = iter([0.0, 2.0, 10.0, 12.0, 14.0])
    >>> rate = Rate(now=lambda: next(seconds))     # counting from 0 at 0 s
    >>> rate.pause()                               # at 2 s
    >>> rate.resume()                              # at 10 s
    >>> rate.window(100)                           # at 12 s: 100 samples in 4 s
    25.0
    >>> rate.window(200)                           # at 14 s: 100 more in 2 s
    50.0
    """

    def __init__(self, count: int = 0, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.restart(count)

    def restart(self, count: int) -> None:
        """Begin anew (an epoch): the counter stands at `count`."""
        self._start = self._last = self._now()
        self._start_count = self._last_count = count
        self._paused: float | None = None

    def pause(self) -> None:
        """Stop the watch; calling it twice changes nothing."""
        if self._paused is None:
            self._paused = self._now()

    def resume(self) -> None:
        """Let the watch run on; the time since `pause` is left out."""
        if self._paused is not None:
            away = self._now() - self._paused
            self._start += away
            self._last += away
            self._paused = None

    def window(self, count: int) -> float:
        """Return the rate since the last call, and start the next window; 0 if no time has passed."""
        now = self._read()
        rate = _divide(count - self._last_count, now - self._last)
        self._last, self._last_count = now, count
        return rate

    def total(self, count: int) -> float:
        """Return the rate since the start."""
        return _divide(count - self._start_count, self._read() - self._start)

    def elapsed_s(self) -> float:
        """Return the seconds since the start, without the pauses."""
        return self._read() - self._start

    def _read(self) -> float:
        return self._paused if self._paused is not None else self._now()


def _divide(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
