"""Write a run's metrics and events to its folder."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.core import Clock
from etude.engine.callback import Callback, Logs, RunInfo
from etude.monitor import EventLog, JsonlSink, RunFolder
from etude.monitor.sinks import read_jsonl

logger = logging.getLogger("etude")


class RunRecorder(Callback):
    """Records log points (split `train`), validations (`val`) and epochs (`epoch`) in metrics.jsonl.

    Start, phases, checkpoints, stop and errors go to events.jsonl. Only the main process has a recorder. If the
    folder cannot be written for a while, records are lost, but the run continues.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self._events = EventLog(folder.events_path)
        self._metrics = JsonlSink(folder.metrics_path, self._warn)
        self._clock: Clock | None = None
        self._epoch = 0
        self._resumed_at = 0
        self._written: set[str] = set()
        """Splits recorded at that step before the run was resumed; they are recorded again."""
        self._begun: set[Any] = set()
        """Phases that started at that step before the run was resumed; they may start again."""

    def on_train_begin(self, run: RunInfo) -> None:
        """Drop records of repeated work or of an earlier run; record the start or the resume."""
        self._clock = run.clock
        step = run.clock.step
        self._close()
        self.folder.trim(step if step > 0 else -1)
        self.folder.result_path.unlink(missing_ok=True)  # a continued run is no longer finished
        self._resumed_at = step
        self._written = {str(one.get("split")) for one in self.folder.read_metrics() if one.get("step") == step}
        events = read_jsonl(self.folder.events_path)
        self._begun = {
            event.get("phase") for event in events if (event.get("kind"), event.get("step")) == ("phase", step)
        }
        kind, words = ("resume", f"resumed at step {step}") if run.resumed else ("start", "started")
        self._events.write(kind, f"{run.name} {words}", step=step, epoch=run.clock.epoch, device=str(run.device))

    def on_epoch_begin(self, epoch: int) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_log(self, record: Logs) -> None:
        """Write a log point."""
        self._record("train", self._epoch, record)

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Write a validation."""
        self._record("val", epoch, metrics)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the averages of an epoch."""
        self._record("epoch", epoch, logs)

    def on_checkpoint(self, path: Path) -> None:
        """Record a checkpoint."""
        self._events.write("checkpoint", f"saved {path.name}", path=str(path), **self._place())

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Record a callback's message: a warning, or the kind of event that its facts name."""
        fields = {**self._place(), **facts}
        kind = fields.pop("event", "warning")
        if kind != "phase" or fields.get("step") != self._resumed_at or fields.get("phase") not in self._begun:
            self._events.write(kind, message, **fields)

    def on_exception(self, error: BaseException) -> None:
        """Record the error that ended the run."""
        kind = "interrupt" if isinstance(error, KeyboardInterrupt) else "error"
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        self._events.write(kind, text, error=type(error).__name__, **self._place())
        self._close()

    def on_train_end(self, result: Logs) -> None:
        """Record how the run ended."""
        stopped = self.control.stop
        kind, words = ("stop", f"stopped: {self.control.reason}") if stopped else ("end", "finished")
        self._events.write(kind, words, result=dict(result), **self._place())
        self._close()

    def _record(self, split: str, epoch: int, numbers: Logs) -> None:
        record: Mapping[str, Any] = {
            **self._place(),
            "epoch": epoch,
            "split": split,
            "time": round(time.time(), 3),
            **numbers,
        }
        if record.get("step") != self._resumed_at or split not in self._written:
            self._metrics.write(record)

    def _place(self) -> dict[str, int]:
        return {"step": self._clock.step} if self._clock is not None else {}

    def _warn(self, message: str) -> None:
        self._events.write("warning", message)
        logger.warning(message)

    def _close(self) -> None:
        self._metrics.close()
        self._events.close()
