"""The progress display: live on a terminal, plain lines in a file. It has no thread and no tensors."""

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

import torch

from etude.callbacks.progress_view import (
    Row,
    View,
    epoch_line,
    keep_rows,
    log_line,
    outcome_line,
    row_state,
    validation_line,
)
from etude.callbacks.progress_words import is_metric, to_ascii
from etude.core import Clock, StepReport
from etude.engine.callback import Callback, Logs, RunInfo

if TYPE_CHECKING:
    from etude.callbacks.terminal import LiveTerminal

NEVER = sys.maxsize
LOOKS = 4
"""How often the clock is read between two refreshes."""
MAX_SHARE = 0.01
"""Share of the run's time that drawing may take: on a slow terminal the display is refreshed less often."""


class ProgressDisplay(Callback):
    """Shows name, device, finished epochs, progress, numbers and the time left.

    On a terminal it draws from `on_step_end`, every `refresh_s` seconds at most; in between a step costs one addition
    and one comparison. Elsewhere it writes one line per log point and epoch, without control characters.
    Output that fails (a closed pipe, a lost terminal) ends the display, never the run.
    """

    shows_notices = True

    def __init__(self, refresh_s: float = 0.25, stream: TextIO | None = None) -> None:
        super().__init__()
        self.refresh_s = refresh_s
        self._given_stream = stream
        self._stream: TextIO | None = stream if stream is not None else sys.stdout
        self._terminal: LiveTerminal | None = None
        self._clock: Clock | None = None
        self._view = View()
        self._began = self._epoch_began = time.perf_counter()
        self._first_step = self._epoch_first_step = 0
        self._steps, self._next_tick = 0, NEVER
        self._ticked, self._drawn_at = (0.0, 0), 0.0
        self._interval_s = refresh_s

    # --- hooks

    def on_train_begin(self, run: RunInfo) -> None:
        """Begin to show a run; only the main process does."""
        self._clock = run.clock
        rows = self._view.rows if run.clock.step else []
        self._view = View(
            title=run.name,
            subtitle=_subtitle(run),
            total_epochs=run.total_epochs,
            total_steps=run.total_steps,
            steps_per_epoch=run.steps_per_epoch,
            epoch=run.clock.epoch,
            rows=rows,
            num_epochs=max(len(rows), run.clock.epoch),
        )
        self._began = self._epoch_began = time.perf_counter()
        self._first_step = self._epoch_first_step = run.clock.step
        self._stream = (self._given_stream if self._given_stream is not None else sys.stdout) if run.is_main else None
        if self._stream is not None and _is_terminal(self._stream):
            self._start_terminal(self._stream)
        else:
            self._say(f"{self._view.title}  {self._view.subtitle}")

    def on_epoch_begin(self, epoch: int) -> None:
        """Begin a new bar."""
        self._view.epoch = epoch
        self._epoch_began = time.perf_counter()
        if self._clock is not None:
            inside = self._clock.position > 0 and self._view.steps_per_epoch is not None
            self._epoch_first_step = epoch * (self._view.steps_per_epoch or 0) if inside else self._clock.step
        self._draw()

    def on_step_end(self, report: StepReport) -> None:
        """Count, and look at the clock when a refresh may be due."""
        self._steps += 1
        if self._steps >= self._next_tick:
            self._tick()

    def on_log(self, record: Logs) -> None:
        """Take new numbers."""
        self._view.record = dict(record)
        if self._terminal is not None:
            self._tick()
        else:
            self._update()
            self._say(log_line(self._view))

    def on_validation_begin(self, epoch: int) -> None:
        """Say what takes so long."""
        self._view.validating = True
        self._draw()

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Go back to training. Inside an epoch the numbers are told here; at its end they are part of its row."""
        self._view.validating = False
        per_epoch = self._view.steps_per_epoch
        self._update()
        if per_epoch is None or self._view.step_in_epoch < per_epoch:
            self.note(validation_line(self._view, metrics))
        else:
            self._draw()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add a row to the table."""
        seconds = time.perf_counter() - self._epoch_began
        shown = {name: value if math.isfinite(value) else None for name, value in logs.items() if is_metric(name)}
        speed = {name: logs[name] for name in ("tokens_per_s", "mfu", "data_wait") if name in logs}
        row = Row(epoch, seconds, shown, speed)
        self._view.rows = keep_rows([*(r for r in self._view.rows if r.epoch < epoch), row])
        self._view.num_epochs = epoch + 1
        self._draw()
        if self._terminal is None:
            self._say(epoch_line(self._view, row))

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Show what a callback tells the user."""
        self.note(message)

    def on_exception(self, error: BaseException) -> None:
        """Leave the terminal as it was; the error itself is for others to report."""
        if isinstance(error, KeyboardInterrupt):
            self._finish("interrupted")
        else:
            self._finish("failed", type(error).__name__)

    def on_train_end(self, result: Logs) -> None:
        """Show the outcome."""
        if self.control.stop:
            self._finish("stopped", self.control.reason)
        else:
            self._finish("finished")

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of the table, so that a resumed run shows the epochs before."""
        return {"rows": [row_state(row) for row in self._view.rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows."""
        self._view.rows = [Row(**row) for row in state["rows"]]

    # --- showing

    def note(self, text: str) -> None:
        """Show a sentence below the bars, such as what Ctrl-C does; safe to call from a signal handler."""
        self._view.note = text
        if self._terminal is not None:
            # The next step draws it: a signal may have come in the middle of drawing.
            self._drawn_at, self._next_tick = -math.inf, 0
        else:
            self._say(text)

    def close(self) -> None:
        """Stop drawing and give the cursor back; safe to call twice."""
        terminal, self._terminal = self._terminal, None
        self._next_tick = NEVER
        if terminal is not None:
            atexit.unregister(self.close)
            terminal.stop()

    def _start_terminal(self, stream: TextIO) -> None:
        from etude.callbacks.terminal import LiveTerminal  # imports rich, which only a terminal needs

        self.close()
        self._terminal = LiveTerminal(stream)
        atexit.register(self.close)
        self._interval_s = self.refresh_s
        self._draw()

    def _tick(self) -> None:
        """Draw if it is time, and guess from the pace of the last steps when to look again."""
        now = time.perf_counter()
        then, first = self._ticked
        stretch, pace = self._steps - first, (self._steps - first) / max(now - then, 1e-9)
        self._ticked = (now, self._steps)
        if now - self._drawn_at >= self._interval_s:
            self._draw()
        if self._terminal is not None:
            # Four looks per refresh, and at most twice the last stretch: steps that become slow do not freeze it.
            guess = int(pace * self._interval_s / LOOKS)
            self._next_tick = self._steps + max(1, min(guess, 2 * stretch))

    def _draw(self) -> None:
        if self._terminal is None:
            return
        begin = time.perf_counter()
        self._update()
        try:
            self._terminal.draw(self._view)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and self._stream is not None and not self._stream.closed:
                raise
            self._stream = None  # the terminal is gone, or the stream is closed
            self.close()
            return
        now = time.perf_counter()
        self._interval_s = max(self.refresh_s, (now - begin) / MAX_SHARE)
        self._drawn_at, self._ticked = now, (now, self._steps)
        if self._next_tick == NEVER:
            self._next_tick = self._steps + 1

    def _update(self) -> None:
        """Bring the counters and times of the view up to date."""
        view = self._view
        view.elapsed_s = time.perf_counter() - self._began
        if self._clock is None:
            return
        view.step = self._clock.step
        view.step_in_epoch = max(0, view.step - self._epoch_first_step)
        if view.steps_per_epoch is not None:
            view.step_in_epoch = min(view.step_in_epoch, view.steps_per_epoch)
        done = view.step - self._first_step
        if view.total_steps is not None and done > 0:
            view.left_s = view.elapsed_s / done * max(0, view.total_steps - view.step)

    def _finish(self, outcome: str, why: str = "") -> None:
        self._update()
        self._view.outcome, self._view.note, self._view.validating = outcome, why, False
        if self._terminal is not None:
            self._draw()
            self.close()
        else:
            self._say(outcome_line(self._view) + (f": {why}" if why else ""))

    def _say(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            try:
                self._stream.write(text + "\n")
            except UnicodeEncodeError:
                self._stream.write(to_ascii(text) + "\n")
            self._stream.flush()
        except RuntimeError:  # a signal came in the middle of a write, and this is its handler
            pass
        except (OSError, ValueError):  # a closed pipe or file
            self._stream = None


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _subtitle(run: RunInfo) -> str:
    if run.device.type == "cuda":
        device = f"{run.device} ({torch.cuda.get_device_name(run.device)})"
    elif run.device.type == "cpu":
        threads = torch.get_num_threads()
        device = f"cpu ({threads} thread{'s' * (threads != 1)})"
    else:
        device = str(run.device)
    parts = [device, f"{sum(p.numel() for p in run.model.parameters()):,} parameters"]
    return ", ".join(parts + [f"resumed at step {run.clock.step:,}"] * run.resumed)
