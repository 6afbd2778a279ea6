"""The live state of a run, read from its folder by any process, also if the run has died."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.core.errors import RunFolderError
from etude.monitor.heartbeat import INTERVAL_S
from etude.monitor.reading import (
    CONFIG,
    EVENTS,
    METRICS,
    RESULT,
    STATUS,
    Follower,
    last_records,
    read_config,
    read_json,
)

PATIENCE = 4
"""Missing heartbeats after which a run counts as lost."""
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("time", "step_time", "steps_per_s", "interval_s"), (int, float)),
    **dict.fromkeys(("step", "epoch", "total_steps", "total_epochs", "processes"), int),
    **dict.fromkeys(("name", "monitor", "mode", "message", "activity", "state"), str),
    **dict.fromkeys(("best", "last"), dict),
}
ENDS = ("finished", "stopped", "interrupted", "failed")


@dataclass(slots=True)
class RunStatus:
    """A snapshot of a run. Times are seconds since 1970, durations seconds; None where nothing is known."""

    path: Path
    name: str
    state: str
    """running, finished, stopped, interrupted, failed, or lost: its heartbeat stopped without a word."""
    activity: str = ""
    """What a running one does: training or validating."""
    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    """Epochs completed."""
    total_epochs: int | None = None
    phase: str = ""
    steps_per_s: float | None = None
    left_s: float | None = None
    """Estimated time until its end."""
    started: float | None = None
    duration_s: float = 0.0
    """Time in which it ran, without pauses before a resume."""
    resumes: int = 0
    processes: int = 1
    """Processes that train together, or did at last."""
    heartbeat: float | None = None
    """When it last showed that it is alive."""
    last_step_time: float | None = None
    """When a step was last finished, to the precision of the heartbeat."""
    monitor: str = ""
    mode: str = ""
    best: dict[str, Any] | None = None
    """The best value of the monitored metric: value, step, epoch (counted from 1)."""
    last: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The last metrics of each name that were recorded."""
    message: str = ""
    """The reason of its end, or its last warning."""

    @property
    def progress(self) -> float | None:
        """The share of the steps that are done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None


class Monitor:
    """Follows one run: `read` returns its state now, and costs little even if the run is long.

    >>> Monitor("runs/nothing")
    Traceback (most recent call last):
    etude.core.errors.RunFolderError: runs/nothing holds no run: there is no config.yaml
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        if not (self.path / CONFIG).is_file():
            raise RunFolderError(f"{self.path} holds no run: there is no {CONFIG}")
        self._events = Follower(self.path / EVENTS)
        self._restarts = 0
        self._history = _History()

    def read(self, records: Iterable[dict[str, Any]] | None = None) -> RunStatus:
        """Return the state of the run at this moment; `records` are its last metrics, if they are known."""
        history = self._read_events()
        beat, result = _sound(read_json(self.path / STATUS)), _sound(read_json(self.path / RESULT))
        name = history.name or str(read_config(self.path).get("name") or self.path.name)
        status = RunStatus(self.path, name, "", total_epochs=history.total_epochs)
        status.phase, status.message, status.resumes = history.phase, history.message, history.resumes
        status.state = self._state(history, beat, result)
        status.total_steps, status.processes = history.total_steps, history.processes
        status.step, status.epoch = beat.get("step") or result.get("step") or 0, beat.get("epoch") or 0
        status.heartbeat, status.last_step_time = beat.get("time", history.last_time), beat.get("step_time")
        status.started, status.duration_s = history.started, history.duration_s
        if history.is_open and status.heartbeat is not None and history.begun is not None:
            status.duration_s += max(0.0, status.heartbeat - history.begun)
        judged: dict[str, Any] = {
            **beat,
            **{key: result[key] for key in ("monitor", "mode", "best", "last") if key in result},
        }
        status.monitor, status.mode = judged.get("monitor") or history.monitor, judged.get("mode") or history.mode
        status.best, status.last = judged.get("best"), judged.get("last")
        _add_metrics(status, last_records(self.path / METRICS) if records is None else records)
        if status.state == "running":
            status.activity, status.steps_per_s = beat.get("activity", ""), beat.get("steps_per_s")
            if status.steps_per_s and status.total_steps:
                status.left_s = max(0, status.total_steps - status.step) / status.steps_per_s
        return status

    def _state(self, history: "_History", beat: dict[str, Any], result: dict[str, Any]) -> str:
        if result.get("status") == "finished":
            return "finished"
        if not history.is_open and history.status:
            return history.status
        if beat.get("state") in ENDS and beat.get("time", 0) >= (history.begun or 0):
            return str(beat["state"])
        patience = PATIENCE * float(beat.get("interval_s") or INTERVAL_S)
        seen = beat.get("time") or history.last_time
        return "running" if seen is not None and time.time() - seen <= patience else "lost"

    def _read_events(self) -> "_History":
        while True:
            records = self._events.read()
            if self._events.restarts != self._restarts:
                self._restarts, self._history = self._events.restarts, _History()
            for record in records:
                self._history.add(_sound(record))
            if not records:
                return self._history


def _sound(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without values of another type than they have: a damaged folder must not hide the others."""
    return {key: one for key, one in record.items() if key not in _TYPES or isinstance(one, _TYPES[key])}


def _add_metrics(status: RunStatus, records: Iterable[dict[str, Any]]) -> None:
    latest: dict[str, Any] = {}
    for record in records:
        status.step = max(status.step, _sound(record).get("step", 0))
        latest |= {name: one for name, one in record.items() if isinstance(one, (int, float)) and one is not True}
    status.metrics = {name: one for name, one in latest.items() if name not in ("step", "epoch", "time")}


@dataclass(slots=True)
class _History:
    """What the events of a run say."""

    name: str = ""
    status: str = ""
    message: str = ""
    phase: str = ""
    monitor: str = ""
    mode: str = ""
    started: float | None = None
    begun: float | None = None
    """When it was started or resumed for the last time."""
    last_time: float | None = None
    duration_s: float = 0.0
    resumes: int = 0
    processes: int = 1
    is_open: bool = False
    """Whether it has begun and not ended."""
    total_steps: int | None = None
    total_epochs: int | None = None

    def add(self, record: dict[str, Any]) -> None:
        """Add an event."""
        kind, now = record.get("kind"), record.get("time")
        if kind in ("start", "resume"):
            self._begin(record)
        elif kind == "end":
            self._close(now)
            self.is_open, self.status, self.message = (
                False,
                str(record.get("status", "")),
                record.get("message") or "",
            )
        elif kind == "phase":
            self.phase = str(record.get("phase", ""))
        elif kind in ("warning", "recovery"):
            self.message = str(record.get("message", ""))
        self.last_time = now if isinstance(now, (int, float)) else self.last_time

    def _begin(self, record: dict[str, Any]) -> None:
        self._close(self.last_time)  # it was killed
        self.resumes += record.get("kind") == "resume"
        self.begun, self.is_open, self.status, self.message = record.get("time"), True, "", ""
        self.started = self.started if self.started is not None else self.begun
        for key in ("name", "monitor", "mode", "total_steps", "total_epochs", "processes"):
            if record.get(key) is not None:
                setattr(self, key, record[key])

    def _close(self, now: float | None) -> None:
        if self.is_open and now is not None and self.begun is not None:
            self.duration_s += max(0.0, now - self.begun)
