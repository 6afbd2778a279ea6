"""Shared parts of the loops by epoch: stopping, ending a run, saved states, and a progress line."""

import contextlib
import logging
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self, TextIO

from etude.callbacks import EarlyStopping, LRSchedule, ModelCheckpoint, ProgressDisplay
from etude.callbacks.progress import is_terminal
from etude.core import CheckpointError, ConfigError, Control, StepReport
from etude.engine.callback import Callback, Logs, RunInfo

logger = logging.getLogger("etude")

REFRESH_S = 0.25


class EpochLoop(ABC):
    """A loop whose user writes the outer one: check `should_stop`, end with `finish` or a `with` block."""

    def __init__(self) -> None:
        self.control = Control()

    @property
    def should_stop(self) -> bool:
        """Whether a callback asked to stop, as `EarlyStopping` does; the reason is in `control.reason`."""
        return self.control.stop

    @abstractmethod
    def finish(self) -> None:
        """End the run: callbacks close their files and warn."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()


class UnusedLoss:
    """Warns that a loss of validation was never used: at the end of the run, or with a loop that is never finished."""

    def __init__(self, loop: EpochLoop) -> None:
        self._epochs: list[bool] = []
        self.say = weakref.finalize(loop, _warn_of_unused, self._epochs)
        """Warn if there is reason to, once."""

    def trained(self, *, validates: bool) -> None:
        """Record whether an epoch has a validation."""
        self._epochs[:] = [validates or any(self._epochs)]


def _warn_of_unused(epochs: list[bool]) -> None:
    if epochs and not any(epochs):
        logger.warning(
            "val_loss was never used, because no epoch had a validation; pass train_epoch a val_dataloader"
        )


def check_keys(state: Mapping[str, Any], keys: Collection[str], owner: str) -> None:
    """Raise CheckpointError unless a saved state has all its keys."""
    if missing := [key for key in keys if key not in state]:
        raise CheckpointError(f"this is not the state of a {owner}: it has no {', '.join(missing)}")


def check_validation(callbacks: Iterable[Callback], validation: Any, remedy: str) -> None:
    """Raise ConfigError for callbacks that monitor a validation metric if there is no validation."""
    if validation is not None:
        return
    for callback in callbacks:
        if not isinstance(callback, (EarlyStopping, ModelCheckpoint, LRSchedule)) or callback.monitored is None:
            continue
        if (name := callback.monitored.name).startswith("val_"):
            raise ConfigError(
                f"{type(callback).__name__} monitors '{name}', but there is no validation here: give {remedy}, give "
                f"the callback to the ValidationLoop, or monitor a training metric such as 'loss'"
            )


# ------------------------------------------------------------------------------------------------ progress


def wants_progress(progress: bool | None, callbacks: Iterable[Callback]) -> bool:
    """Return whether to show a progress line: if requested, or on a terminal without a display callback."""
    if progress is not None:
        return progress
    return is_terminal(sys.stdout) and not any(isinstance(one, ProgressDisplay) for one in callbacks)


class EpochProgress(Callback):
    """A progress line for the current epoch: redrawn in place on a terminal, written once at the end elsewhere."""

    def __init__(self, progress: bool | None = None, stream: TextIO | None = None) -> None:
        """With `progress` True, a line per epoch is written even if the output is not a terminal."""
        super().__init__()
        self._stream = stream
        self._writes_always = bool(progress)
        self._label = self._words = ""
        self._total: int | None = None
        self._count = 0
        self._began = self._due = 0.0

    def begin(self, label: str, total: int | None) -> None:
        """Begin a line of `total` steps; None if unknown."""
        self._label, self._total, self._count, self._words = label, total, 0, ""
        self._began = time.perf_counter()
        self._due = self._began + REFRESH_S

    def advance(self) -> None:
        """Count one step, and redraw if it is time."""
        self._count += 1
        if (now := time.perf_counter()) >= self._due:
            self._due = now + REFRESH_S
            self.draw()

    def draw(self, end: str = "") -> None:
        """Draw the line; with an `end` it stays on screen."""
        stream = self._stream if self._stream is not None else sys.stdout
        terminal = is_terminal(stream)
        if not terminal and not (end and self._writes_always):
            return
        total = "" if self._total is None else f"/{self._total}"
        seconds = time.perf_counter() - self._began
        erase = "\r\x1b[2K" if terminal else ""
        with contextlib.suppress(OSError, ValueError):  # a closed pipe loses the line, not the run
            stream.write(f"{erase}{self._label}  {self._count}{total}{self._words}  {seconds:.1f} s{end}")
            stream.flush()

    def on_train_begin(self, run: RunInfo) -> None:
        """Set the number of steps per epoch."""
        self._total = run.steps_per_epoch

    def on_epoch_begin(self, epoch: int) -> None:
        """Begin a line."""
        self.begin(f"epoch {epoch + 1}", self._total)

    def on_step_end(self, report: StepReport) -> None:  # noqa: ARG002 - hook signature
        """Count a step."""
        self.advance()

    def on_log(self, record: Logs) -> None:
        """Show metrics that have been read anyway."""
        names = ("loss", "accuracy", "lr")
        self._words = "".join(f"  {name} {record[name]:.4g}" for name in names if name in record)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:  # noqa: ARG002 - hook signature
        """Finish the line with the metrics of the epoch."""
        self.on_log(logs)
        self.draw("\n")

    def on_exception(self, error: BaseException) -> None:  # noqa: ARG002 - hook signature
        """Finish the line as it is."""
        self.draw("\n")
