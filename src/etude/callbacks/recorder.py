"""Write a run's metrics, events and heartbeat to its folder."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from etude.callbacks.events import EventCallback
from etude.core import RunFolderError
from etude.engine.callback import Logs, RunInfo
from etude.monitor.events import (
    EpochStarted,
    Event,
    MediaLogged,
    MetricsEvent,
    PhaseStarted,
    RunEnded,
    StepsLogged,
    Warned,
    record_of,
)
from etude.monitor.heartbeat import Heartbeat
from etude.monitor.jsonl import JsonlSink, read_jsonl
from etude.monitor.run_folder import RunFolder

logger = logging.getLogger("etude")
_EARLIER: dict[torch.device, tuple[int, int]] = {}
"""The peaks of devices until torch began to measure them again."""


class RunRecorder(EventCallback):
    """Records log points (split `train`), validations (`val`) and epochs (`epoch`) in metrics.jsonl.

    Texts and matrices go to media.jsonl, other events to events.jsonl, a heartbeat to status.json. Only the main
    process has a recorder. If the folder cannot be written for a while, records are lost, but the run continues.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self._events = JsonlSink(folder.events_path)
        self._metrics = JsonlSink(folder.metrics_path, self._warn)
        self._media = JsonlSink(folder.media_path, self._warn)
        self._heartbeat: Heartbeat | None = None
        self._files: Mapping[str, str] = {}
        """The files of metrics as they are in the folder."""
        self._device = torch.device("cpu")
        self._resumed_at = 0
        self._written: set[Any] = set()
        """Records of that step from before the run was resumed; they are not recorded again."""

    def on_train_begin(self, run: RunInfo) -> None:
        """Drop records of repeated work or of an earlier run; record the start or the resume."""
        step = run.clock.step
        self._close()
        self.folder.trim(step if step > 0 else -1)
        self.folder.result_path.unlink(missing_ok=True)  # a continued run is no longer finished
        self._resumed_at, self._device = step, run.device
        paths = (self.folder.metrics_path, self.folder.media_path, self.folder.events_path)
        records = (record for path in paths for record in read_jsonl(path))
        self._written = {_identity(record) for record in records if record.get("step") == step} - {None}
        self._heartbeat = Heartbeat(self.folder.status_path, run.clock, run.total_steps, run.best, run.processes)
        super().on_train_begin(run)

    def on_validation_begin(self, epoch: int) -> None:
        """Show in the heartbeat that validation is running."""
        self._show("validating")

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Write a validation."""
        self._show("training")
        super().on_validation_end(epoch, metrics)
        self._write_files()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write an epoch."""
        super().on_epoch_end(epoch, logs)
        self._write_files()

    def _write_files(self) -> None:
        """Write the files of metrics before the next checkpoint: a run that is killed after its last one has them."""
        files = {} if self._task is None else self._task.files()
        if files == self._files:
            return
        try:
            self.folder.write_files(files)
            self._files = files
        except RunFolderError as error:  # like records, they are written again later
            self._warn(str(error))

    def on_validation_cut_off(self, epoch: int) -> None:
        """Show in the heartbeat that validation has ended."""
        self._show("training")

    def receive(self, event: Event) -> None:
        """Write the event."""
        record = record_of(event)
        if event.step == self._resumed_at and _identity(record) in self._written:
            return
        if isinstance(event, MetricsEvent):
            if isinstance(event, StepsLogged):
                record |= memory_in_use(self._device)
            self._metrics.write(record)
        elif isinstance(event, MediaLogged):
            self._media.write(record)
        elif not isinstance(event, EpochStarted):  # epochs are in the metrics
            self._events.write(record)
        if isinstance(event, RunEnded):
            self._close(event.status)

    def _show(self, activity: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.activity = activity

    def _warn(self, message: str) -> None:
        self._events.write(record_of(Warned(**self._place(), message=message)))
        logger.warning(message)

    def _close(self, state: str = "stopped") -> None:
        for one in (self._metrics, self._media, self._events):
            one.close()
        if self._heartbeat is not None:
            self._heartbeat.end(state)


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Return the most memory that tensors had on a CUDA device, else what the process has; empty if nobody says."""
    if device.type == "cuda":
        return {"memory_bytes": peak_memory(device)[0]}
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return {"memory_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
    except (OSError, ValueError, AttributeError):
        return {}


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the most memory of a CUDA device since the start, by tensors and by torch."""
    allocated, reserved = _EARLIER.get(device, (0, 0))
    now = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return max(allocated, now[0]), max(reserved, now[1])


def restart_peaks(device: torch.device) -> None:
    """Let torch measure the peaks of a CUDA device from now on; `peak_memory` still knows the earlier ones."""
    _EARLIER[device] = peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)


def _identity(record: dict[str, Any]) -> Any:
    """Return what a record is about, if a resumed run may write it again at the step of the checkpoint."""
    match record:
        case {"split": split}:
            return split
        case {"kind": MediaLogged.kind, "name": name}:
            return (MediaLogged.kind, name)
        case {"kind": PhaseStarted.kind, "phase": phase}:
            return (PhaseStarted.kind, phase)
    return None
