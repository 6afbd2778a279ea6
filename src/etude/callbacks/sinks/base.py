"""Base classes of sinks: events are written by a thread, and a sink that fails is reported once."""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from etude.callbacks.events import EventCallback
from etude.callbacks.sinks.worker import PAUSE_S, Worker
from etude.core import ConfigError
from etude.engine.callback import Logs, RunInfo
from etude.monitor.events import Event, MediaLogged, MetricsEvent, Noted, RunEnded, RunStarted, StepsLogged
from etude.monitor.jsonl import decode, encode, read_jsonl
from etude.monitor.run_folder import SINKS, RunFolder

logger = logging.getLogger("etude")

DRAIN_S = 10.0
"""Seconds that the end of a run waits for a sink."""
_SPEED = frozenset(["batches_per_s", "samples_per_s", "tokens_per_s", "data_wait", "mfu"])
_PROGRESS = frozenset(["epoch", "samples", "phase"])


class SinkCallback(EventCallback):
    """Base class: `open_run`, `write` and `close_run` are called on a thread of the sink.

    Only the main process of a run has that thread. Whatever the three raise is reported once, and training continues.
    """

    label: ClassVar[str]
    """Its name in configs and messages."""
    package: ClassVar[str | None] = None
    """The module that it needs; the extra of that package is called like the sink."""
    pause_s: ClassVar[float] = PAUSE_S
    """Seconds between two calls of `write`; a checkpoint and the end of the run do not wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._worker: Worker | None = None
        self._pid = os.getpid()

    # --- for subclasses

    def begin(self, run: RunInfo) -> None:
        """Prepare, on the thread of the training; raise ConfigError for wrong arguments."""

    def open_run(self, start: RunStarted) -> None:
        """Open what `write` needs."""

    def write(self, events: list[Event]) -> None:
        """Write events in order."""
        raise NotImplementedError

    def close_run(self) -> None:
        """Close everything; the last event was a `RunEnded`, unless the program ended without one."""

    # --- hooks

    def check_installed(self) -> None:
        """Raise ConfigError if the package is missing."""
        if self.package is not None:
            import_package(self.package, self.label)

    def on_train_begin(self, run: RunInfo) -> None:
        """Start the thread. Raises ConfigError if the package is missing."""
        self._end()
        if not run.is_main:
            return
        self.check_installed()
        self._pid = os.getpid()
        self.begin(run)
        super().on_train_begin(run)

    def on_save_begin(self) -> None:
        """Write now: a run that is killed after the checkpoint continues from there."""
        if self._worker is not None:
            self._worker.hurry()

    def receive(self, event: Event) -> None:
        """Queue the event; at the end wait a little."""
        if isinstance(event, RunStarted):
            self._worker = Worker(
                self.label, lambda: self.open_run(event), self.write, self.close_run, pause_s=self.pause_s
            )
            return
        if (worker := self._worker) is None or os.getpid() != self._pid:  # a fork has no thread
            return
        worker.put(event)
        if worker.problems:
            self._pass_on(worker)
        if isinstance(event, RunEnded):
            self._end()

    def _pass_on(self, worker: Worker) -> None:
        while worker.problems:
            self.notify(worker.problems.popleft(), sink=self.label)

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and os.getpid() == self._pid:
            worker.stop(DRAIN_S)
            self._pass_on(worker)


class ThinnedSink(SinkCallback):
    """Base class of sinks to which a log point is expensive: at most `points_per_s` of them are written.

    The last one before a validation, the end of an epoch and so on is always written.
    """

    def __init__(self, points_per_s: float | None) -> None:
        super().__init__()
        self._interval_s = 0.0 if points_per_s is None else 1 / points_per_s
        self._due = -math.inf
        self._held: Logs | None = None
        """The last log point, if it was left out."""
        self._is_announced = False

    def begin(self, run: RunInfo) -> None:
        """Forget an earlier run."""
        self._due, self._held, self._is_announced = -math.inf, None, False

    def on_log(self, record: Logs) -> None:
        """Pass on a log point, unless it comes too soon after the last one."""
        if self._worker is None:
            return
        now = time.monotonic()
        if now < self._due and not record.get("skipped"):
            self._held = record
            if not self._is_announced:
                self._is_announced = True
                words = f"{self.label} gets {1 / self._interval_s:g} log points per second; the run folder has all"
                self.notify(words, event="sink", sink=self.label)
            return
        self._due, self._held = now + self._interval_s, None
        super().on_log(record)

    def receive(self, event: Event) -> None:
        """Queue the event, after the log point before it."""
        if self._held is not None and not isinstance(event, (StepsLogged, Noted)):
            held, self._held = self._held, None
            super().on_log(held)
        super().receive(event)


class ServiceSink(ThinnedSink):
    """Base class of sinks that can only append: they remember what they have written before a resume.

    The id of the run and the last step of every curve are kept in `sinks/NAME.json` of the run folder, not in the
    checkpoint, so that a run that died before its first checkpoint also continues its curves.
    """

    holds_last_step: ClassVar[bool] = False
    """Whether the tool keeps the values of a step in memory until those of the next one come."""

    def __init__(self, points_per_s: float | None) -> None:
        super().__init__(points_per_s)
        self.run_id = ""
        """The id of the run in the other tool."""
        self._written: dict[str, int] = {}
        self._sure: dict[str, int] = {}
        """What had been written before the newest step."""
        self._path: Path | None = None

    def log_events(self, events: list[Event]) -> None:
        """Write events that have not been written before."""
        raise NotImplementedError

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG003
        """Return the file with the id."""
        return (f"{SINKS}/{cls.label}.json",)

    def begin(self, run: RunInfo) -> None:
        """Read the id of a run that is continued."""
        super().begin(run)
        if run.run_dir is not None:
            self._path = run.run_dir / SINKS / f"{self.label}.json"
            known = (decode(self._path.read_bytes()) if self._path.exists() else None) or {}
            self.run_id = str(known.get("id", ""))
            self._written = {str(key): int(step) for key, step in known.get("written", {}).items()}
        elif run.clock.step == 0:
            self._path, self.run_id, self._written = None, "", {}
        self._sure = dict(self._written)

    def write(self, events: list[Event]) -> None:
        """Write what has not been written before."""
        fresh = [event for event in events if event.step > self._written.get(curve_of(event), -1)]
        self.log_events(fresh)
        for event in fresh:
            if curve := curve_of(event):
                if event.step > max(self._written.values(), default=-1):
                    self._sure = dict(self._written)
                self._written[curve] = event.step
        self.save(self._sure if self.holds_last_step else None)

    def save(self, written: Mapping[str, int] | None = None) -> None:
        """Keep the id and the last steps, by default all that were written."""
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            temporary = self._path.with_suffix(".tmp")  # not synced to disk: it is replaced several times per second
            temporary.write_text(
                encode({"id": self.run_id, "written": self._written if written is None else written}) + "\n",
                encoding="utf-8",
            )
            temporary.replace(self._path)


def import_package(module: str, extra: str) -> Any:
    """Import an optional package; raise ConfigError that names the extra."""
    try:
        if find_spec(module.partition(".")[0]) is None:
            raise ConfigError(f"{extra} needs a package that is not installed: pip install 'etude[{extra}]'")
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{extra} cannot be used ({error}): pip install 'etude[{extra}]'") from error


def scalars(event: MetricsEvent) -> dict[str, float]:
    """Return the metrics of an event under names that group: those of validations, of epochs, of the speed.

    >>> scalars(StepsLogged(time=1.0, step=3, metrics={"step": 3, "epoch": 0, "loss": 0.5, "samples_per_s": 9.0}))
    {'progress/epoch': 0.0, 'train/loss': 0.5, 'speed/samples_per_s': 9.0}
    """
    split, found = event.split, {}
    for name, value in event.metrics.items():
        if (tag := _tag(split, name)) is not None and isinstance(value, (int, float)):
            found[tag] = float(value)
    return found


@cache
def _tag(split: str, name: str) -> str | None:
    """Return the name of a metric in other tools; None if it is there already under another name."""
    if split == "val":
        return f"val/{name.removeprefix('val_')}" if name.startswith("val_") else None
    if split == "epoch":
        return None if name.startswith("val_") or name == "phase" else f"epoch/{name}"
    if name == "step":
        return None
    return f"{'progress' if name in _PROGRESS else 'speed' if name in _SPEED else 'train'}/{name}"


def curve_of(event: Event) -> str:
    """Return to which curve an event adds a point; empty if to none."""
    if isinstance(event, MetricsEvent):
        return event.split
    return f"media/{event.name}" if isinstance(event, MediaLogged) else ""


def curves_at(run_dir: Path | None, step: int) -> set[str]:
    """Return the curves that have a point at a step, as the run folder records them."""
    if run_dir is None or step < 0:
        return set()
    folder = RunFolder(run_dir)
    records = [*read_jsonl(folder.metrics_path), *read_jsonl(folder.media_path)]
    here = [record for record in records if record.get("step") == step]
    return {str(record.get("split") or f"media/{record.get('name')}") for record in here}


def config_text(run_dir: str | None) -> str:
    """Return the config of a run; empty if it has no folder."""
    path = None if run_dir is None else RunFolder(run_dir).config_path
    return path.read_text(encoding="utf-8") if path is not None and path.exists() else ""


def settings_of(start: RunStarted) -> dict[str, Any]:
    """Return the config of a run and facts about it, nested."""
    import yaml

    config = yaml.safe_load(config_text(start.run_dir)) or {}
    facts = {"device": start.device, "parameters": start.parameters, "total_steps": start.total_steps}
    return {**(config if isinstance(config, dict) else {}), **facts}
