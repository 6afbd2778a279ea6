"""The hooks of a run as typed events: for functions that subscribe, for the run folder, for sinks."""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch.nn.parameter import UninitializedParameter

from etude.core import Clock, Task
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.monitor.events import (
    CheckpointSaved,
    EpochEnded,
    EpochStarted,
    Event,
    Media,
    MediaLogged,
    Noted,
    PhaseStarted,
    Recovered,
    RunEnded,
    RunStarted,
    Status,
    StepsLogged,
    Validated,
    Warned,
)

logger = logging.getLogger("etude")

MOST_CELLS = 10_000
"""Cells up to which a confusion matrix is an event after every validation."""


class EventCallback(Callback):
    """Base class: passes everything that happens in a run to `receive`, as events. Costs nothing in a step."""

    listens = True

    def __init__(self) -> None:
        super().__init__()
        self._clock = Clock()
        self._epoch = 0
        self._task: Task | None = None

    def receive(self, event: Event) -> None:
        """Take an event. It is called on the thread of the training, so it should be quick."""
        raise NotImplementedError

    def bind(self, parts: RunParts) -> None:
        """Keep the task, which has the matrices of validations."""
        self._task = parts.task

    def on_train_begin(self, run: RunInfo) -> None:
        """Pass on the start or the resume."""
        self._clock, self._epoch = run.clock, run.clock.epoch
        known = [one for one in run.model.parameters() if not isinstance(one, UninitializedParameter)]
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        words = f"resumed at step {run.clock.step}" if run.resumed else "started"
        words += f" by {run.processes} processes" * (run.processes > 1) + f", restart {restart}" * (restart > 0)
        self.receive(
            RunStarted(
                **self._place(),
                message=f"{run.name} {words}",
                name=run.name,
                device=str(run.device),
                resumed=run.resumed,
                processes=run.processes,
                restart=restart,
                total_steps=run.total_steps,
                total_epochs=run.total_epochs,
                steps_per_epoch=run.steps_per_epoch,
                parameters=sum(one.numel() for one in known),
                trainable=sum(one.numel() for one in known if one.requires_grad),
                monitor="" if run.best is None else run.best.name,
                mode="" if run.best is None else run.best.mode,
                run_dir=None if run.run_dir is None else str(run.run_dir),
            )
        )

    def on_epoch_begin(self, epoch: int) -> None:
        """Pass on the start of an epoch."""
        self._epoch = epoch
        self.receive(EpochStarted(**self._place()))

    def on_log(self, record: Logs) -> None:
        """Pass on a log point, and updates that were skipped."""
        now, step = round(time.time(), 3), int(record.get("step", self._clock.step))
        self.receive(StepsLogged(time=now, step=step, epoch=self._epoch, metrics=record))
        if skipped := int(record.get("skipped", 0)):
            words = f"{skipped} update{'s' * (skipped > 1)} not finite and skipped"
            facts = {"skipped": skipped}
            self.receive(Recovered(time=now, step=step, epoch=self._epoch, message=words, facts=facts))

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Pass on a validation and its matrices."""
        self.receive(Validated(**self._place(epoch), metrics=metrics))
        for name, matrix in self._matrices():
            self.receive(MediaLogged(**self._place(epoch), name=name, media="matrix", data=matrix))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Pass on the averages of an epoch."""
        self.receive(EpochEnded(**self._place(epoch), metrics=logs))

    def on_checkpoint(self, path: Path) -> None:
        """Pass on a checkpoint."""
        self.receive(CheckpointSaved(**self._place(), message=f"saved {path.name}", path=str(path)))

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Pass on a message: a warning, or the kind of event that its facts name."""
        others = {key: value for key, value in facts.items() if key not in ("event", "step", "epoch")}
        place = self._place() | {key: facts[key] for key in ("step", "epoch") if key in facts}
        match facts.get("event", "warning"):
            case "warning":
                self.receive(Warned(**place, message=message, facts=others))
            case "phase":
                self.receive(PhaseStarted(**place, message=message, facts=others))
            case topic:
                self.receive(Noted(**place, message=message, facts=others, topic=topic))

    def on_media(self, name: str, media: Media, data: Any) -> None:
        """Pass on a text, a matrix or a picture."""
        self.receive(MediaLogged(**self._place(), name=name, media=media, data=data))

    def on_exception(self, error: BaseException) -> None:
        """Pass on the error that ended the run."""
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        self.receive(RunEnded(**self._place(), status=status, message=text))

    def on_train_end(self, result: Logs) -> None:
        """Pass on how the run ended."""
        status: Status = "interrupted" if self.control.interrupted else "stopped" if self.control.stop else "finished"
        words = self.control.reason or status
        self.receive(RunEnded(**self._place(), status=status, message=words, metrics=dict(result)))

    def _place(self, epoch: int | None = None) -> dict[str, Any]:
        epoch = self._epoch if epoch is None else epoch
        return {"time": round(time.time(), 3), "step": self._clock.step, "epoch": epoch}

    def _matrices(self) -> list[tuple[str, Any]]:
        files = {} if self._task is None else self._task.files()
        found = {Path(name).stem: json.loads(text) for name, text in files.items() if name.endswith(".json")}
        return [(name, one) for name, one in found.items() if len(one.get("classes", ())) ** 2 <= MOST_CELLS]


class Telemetry(EventCallback):
    """Calls a function with every event of a run, or with those of some `kinds`.

    On several processes only the main one calls it. A function that raises is reported once and not called again.

    >>> events = []
    >>> from etude import Trainer  # Trainer(model, data, callbacks=[Telemetry(events.append)]).train()
    """

    def __init__(self, function: Callable[[Event], object], kinds: Collection[type[Event]] | None = None) -> None:
        super().__init__()
        self.function: Callable[[Event], object] | None = function
        self._kinds = None if kinds is None else tuple(kinds)
        self._is_main = True

    def on_train_begin(self, run: RunInfo) -> None:
        """Find out whether this process calls the function."""
        self._is_main = run.is_main
        super().on_train_begin(run)

    def receive(self, event: Event) -> None:
        """Call the function."""
        if self.function is None or not self._is_main or not (self._kinds is None or isinstance(event, self._kinds)):
            return
        try:
            self.function(event)
        except Exception as error:
            self.function = None
            logger.warning(
                "Telemetry: the function failed at a %s event and is not called again: %s: %s",
                event.kind,
                type(error).__name__,
                error,
            )
