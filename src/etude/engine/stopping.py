"""What ends a run early: signals, and non-finite updates.

The first Ctrl-C, SIGTERM or SIGHUP asks the run to stop after the current step, the second stops it at once. Skipped
updates cause one warning per epoch, and an error if nothing can be learned.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from etude.core import TrainingError
from etude.distributed import World
from etude.engine.slow_rank import SlowRank
from etude.engine.step import Step
from etude.engine.step_log import RunningSums, StepLog
from etude.launched import is_asked_once, is_launched

AFTER_STEP = "after this step"
IN_VALIDATION = "now: this validation is repeated when the run is resumed"
OTHER_PROCESS = "signal to another process"
POLL_S = 0.5
"""How often ranks exchange whether one of them was asked to stop."""
REMEDIES = "To continue, lower the learning rate, set training.gradient_clip_norm, or check the data for NaN"
FINDER = "the callback nan_debugger names the samples and the first layer"
USUAL_SHARE = 0.1
"""Share of updates that a loss scale may skip while it adapts, before a warning."""


class Interrupted(Exception):
    """A signal interrupted a validation, on all ranks."""


class Interrupts:
    """Context in which signals become requests. Outside the main thread it does nothing.

    >>> with Interrupts(print) as interrupts:
    ...     signal.raise_signal(signal.SIGINT)
    stopping after this step; press Ctrl-C again to stop at once
    >>> interrupts.requested
    'SIGINT'
    """

    SIGNALS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """`say` receives a message for the terminal when the first signal arrives."""
        self.requested = ""
        """Name of the first signal received, or empty."""
        self.may_cut_off = False
        """Whether a validation is running that a signal may interrupt."""
        self._say = say
        self._process = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                # the signal is ignored, as by nohup
                if number.name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_forked(number)
            return
        if self.requested:
            if is_asked_once():
                return
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        if self.requested == "SIGHUP":
            _leave_terminal()
        # A launcher of ours ends processes with SIGTERM after another one has failed, which it says itself.
        if self._say is not None and not (self.requested == "SIGTERM" and is_launched()):
            self._say(
                f"stopping {IN_VALIDATION if self.may_cut_off else AFTER_STEP}; press Ctrl-C again to stop at once"
            )

    def _in_forked(self, number: int) -> None:
        """In a forked child, restore the previous handlers; the run itself handles Ctrl-C and SIGHUP."""
        if number == signal.SIGTERM:  # the signal with which the run ends its children
            signal.signal(number, self._previous[signal.SIGTERM])
            os.kill(os.getpid(), number)


def _leave_terminal() -> None:
    """Discard output if its terminal is gone: every further write would raise."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


class StopPoll:
    """Reports a signal to the loop. All ranks must stop after the same step, so they exchange requests."""

    def __init__(self, interrupts: Interrupts, world: World) -> None:
        self._interrupts = interrupts
        self._world = world
        self._last: tuple[float, int] | None = None
        self.due = 0 if world.size > 1 else 2**62
        """The next step after which ranks exchange requests; a single process checks after every step."""
        self.all_written = False
        """Whether no rank wrote a checkpoint in the background when they last exchanged, at this step."""
        self.warnings: list[str] = []
        """What other ranks have warned of, or a warning about one of them, on rank 0: found by `asked`."""
        self.slow_rank = SlowRank(world)

    def asked(self, step: int, *, is_writing: bool = False) -> str:
        """Return why the run must stop after `step`, or an empty string."""
        mine = self._interrupts.requested
        if self._world.size == 1:
            self.all_written = not is_writing
            return mine
        self.all_written = False
        self.warnings = []
        if step < self.due:
            return ""
        now, (then, since) = time.perf_counter(), self._last or (0.0, step)
        done = step - since
        # At most twice the last interval, so that a signal is handled soon even if steps become slow.
        gap = max(1, min(2 * done, int(done / max(now - then, 1e-9) * POLL_S)))
        log = self._world.log
        news = [int(bool(mine)), -gap, int(is_writing), 0 if log is None else log.waiting, *self.slow_rank.mine()]
        anyone, shortest, busy, warned, *waits = self._world.host_max(
            news
        )  # the only exchange, so that it costs little
        self.all_written = not busy
        self.due, self._last = step - shortest, (now, step)
        self.warnings = log.exchange() if warned and log is not None else []
        slow = self.slow_rank.find(waits)
        if slow and self._world.is_main:
            self.warnings.append(slow)
        return (mine or OTHER_PROCESS) if anyone else ""


class FiniteCheck:
    """Evaluates the skipped updates of a run whenever its step log has been read."""

    def __init__(self, log: StepLog, step: Step, max_skipped_steps: int) -> None:
        self._log = log
        self._step = step
        self._is_scaled = step.precision.scaler is not None
        self._limit = max_skipped_steps

    def streak(self, step: int) -> None:
        """Raise TrainingError after too many consecutive non-finite updates."""
        if (streak := self._log.bad_streak) >= self._limit:
            self._raise(f"the last {streak} steps, up to step {step}", f" (training.max_skipped_steps={self._limit})")

    def epoch(self, tally: RunningSums, epoch: int) -> str:
        """Return a warning after an epoch, counted from 1, or an empty string.

        Raises TrainingError if all its updates were skipped. With a loss scale, which may still adapt, this is only a
        warning.
        """
        if tally.skipped == tally.steps and tally.skipped and not self._is_scaled:
            self._raise(f"all {tally.steps} steps of epoch {epoch}, so nothing was learned")
        is_usual = self._is_scaled and not tally.bad_losses and tally.skipped < tally.steps * USUAL_SHARE
        if tally.skipped and not is_usual:
            why = "the loss was" if tally.bad_losses else "gradients were"
            step, start, end = tally.first_skipped or (0, 0, 0)
            return (
                f"{_share(tally.skipped, tally.steps)} updates of epoch {epoch} were skipped because {why} not finite, "
                f"first in step {step} with samples {start} to {end - 1} of the epoch's order; {FINDER}"
            )
        if tally.bad_losses and not tally.skipped:
            return (
                f"the loss was not finite in {_share(tally.bad_losses, tally.steps)} steps of epoch {epoch}, though "
                f"its gradients were; averages exclude these steps"
            )
        if tally.counts and not tally.skipped and not any(tally.counts.values()):
            return f"nothing was learned in epoch {epoch}: all of its labels are padding, masked or missing"
        return ""

    def run(self, steps: int) -> None:
        """Raise TrainingError at the end of a run without a single finite update."""
        if steps and self._log.bad_streak >= steps:
            self._raise(f"all {steps} steps of the run, so nothing was learned")

    def _raise(self, where: str, limit: str = "") -> None:
        raise TrainingError(
            f"the loss or its gradients were not finite in {where}; {self._weights()}. {REMEDIES}; {FINDER}{limit}"
        )

    def _weights(self) -> str:
        weights = dict(self._step.model.named_parameters())  # frozen parameters too
        bad = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
        if not bad:
            return "the updates were skipped, so the weights are intact"
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"weights themselves are not finite ({bad[0]}{more}), so go back to an earlier checkpoint or model"


def _share(count: int, total: int) -> str:
    return f"{count} of {total} ({count / total:.0%})"
