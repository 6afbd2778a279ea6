"""The heartbeat of a run: a small file, written every few seconds by a thread, that shows it is alive."""

import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.core.clock import Clock
from etude.core.monitor import Best
from etude.monitor.jsonl import encode

INTERVAL_S = 5.0
"""Seconds between two heartbeats."""
_RATE_OVER = 13
"""Heartbeats over which the rate is taken: about a minute."""


class Heartbeat:
    """Writes step, rate and activity of a run to a file, until `end`; a file that cannot be written is no error."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        total_steps: int | None = None,
        best: Best | None = None,
        processes: int = 1,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.path, self._clock, self._total_steps, self._interval_s = path, clock, total_steps, interval_s
        self._best, self._processes = best, processes
        self.activity = "training"
        """What the run does: training, validating, saving."""
        self._step, self._step_time = clock.step, time.time()
        self._last: deque[tuple[float, int]] = deque(maxlen=_RATE_OVER)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="etude-heartbeat", daemon=True)
        self._write("running")
        self._thread.start()

    def end(self, state: str) -> None:
        """Stop, and write how the run ended."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self.activity = ""
            self._write(state)

    def _beat(self) -> None:
        while not self._over.wait(self._interval_s):
            self._write("running")

    def _write(self, state: str) -> None:
        now, step = time.time(), self._clock.step
        if step != self._step:
            self._step, self._step_time = step, now
        self._last.append((now, step))
        (first, first_step), taken = self._last[0], now - self._last[0][0]
        rate = (step - first_step) / taken if taken > 0 and first < now else None
        beat: dict[str, Any] = {
            "time": round(now, 3),
            "state": state,
            "activity": self.activity,
            "step": step,
            "total_steps": self._total_steps,
            "epoch": self._clock.epoch,
            "step_time": round(self._step_time, 3),
            "steps_per_s": rate,
            "interval_s": self._interval_s,
            "pid": os.getpid(),
            "processes": self._processes,
            **(judged(self._best) if self._best is not None else {}),
        }
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with suppress(OSError):  # not synced to disk: it is worth nothing after a power failure
            temporary.write_text(encode(beat) + "\n", encoding="utf-8")
            temporary.replace(self.path)


def judged(best: Best) -> dict[str, Any]:
    """Return the monitored metric of a run with its last and best value, without the other metrics."""
    values = {
        name: None if one is None else {"value": one.value, "step": one.step, "epoch": one.epoch}
        for name, one in (("last", best.last), ("best", best.best))
    }
    return {"monitor": best.name, "mode": best.mode, **values}
