"""The progress display: live on a terminal or in a notebook, plain lines in a file; without threads and tensors."""

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO, get_type_hints

import torch

from etude.callbacks.notebook import REFRESH_S, NotebookCell, in_notebook
from etude.callbacks.progress_lines import (
    EpochRow,
    Groups,
    View,
    epoch_line,
    finite,
    keep_rows,
    log_line,
    of_total,
    outcome_line,
    parameters_line,
    validation_line,
)
from etude.checkpoint import is_kind, record_of
from etude.core import Clock, StepReport
from etude.engine.callback import Callback, Logs, RunInfo

if TYPE_CHECKING:
    from etude.callbacks.terminal import LiveTerminal

MAX_SHARE = 0.02
"""Share of the run's time that drawing may take: a slow terminal is refreshed less often."""
MAX_NOTICES = 3

_STATE = record_of(
    "ProgressDisplay",
    {
        "rows": list[record_of("EpochRow", get_type_hints(EpochRow))],  # type: ignore[misc]
        "tasks": record_of("Groups", get_type_hints(Groups)),
        "phase": str,
    },
)


class ProgressDisplay(Callback):
    """Shows name, device, finished epochs, tasks, progress, metrics and the remaining time.

    On a terminal it draws in `on_step_end`, at most every `refresh_s` seconds. In a notebook it updates one output of
    the cell, and adds the curves of the losses at the end. Elsewhere it writes one line per log point and epoch,
    without control characters. Output that fails (a closed pipe, a lost terminal) ends the display, never the run.
    """

    shows_notices = True

    def __init__(self, refresh_s: float = 0.25, stream: TextIO | None = None) -> None:
        super().__init__()
        self.refresh_s = refresh_s
        self._given_stream = stream
        self._stream: TextIO | None = stream if stream is not None else sys.stdout
        self._terminal: LiveTerminal | NotebookCell | None = None
        self._least_refresh_s = refresh_s
        self._clock, self._view = Clock(), View()
        self._began = self._epoch_began = time.perf_counter()
        self._first_step = self._epoch_first_step = 0
        self._due = math.inf
        """When the next step draws; infinite without a terminal."""
        self._phase_is_new = False
        self._norms: dict[str, float | None] = {}
        """Metrics of the ending epoch, by name."""

    # --- hooks

    def on_train_begin(self, run: RunInfo) -> None:
        """Start the display; only on the main process."""
        self._clock, before = run.clock, self._view
        self._view = view = View(run.name, _subtitle(run), run.total_epochs, run.total_steps, run.steps_per_epoch)
        view.epoch, view.best = run.clock.epoch, run.best
        if run.clock.step:
            view.rows, view.groups = before.rows, before.groups
        if run.clock.step or self._phase_is_new:  # reported by a callback that comes before the display
            view.phase = before.phase
        self._began = self._epoch_began = time.perf_counter()
        self._first_step = self._epoch_first_step = run.clock.step
        self.close()
        stream = self._given_stream if self._given_stream is not None else sys.stdout
        self._stream = stream if run.is_main else None
        if self._stream is not None and is_terminal(self._stream):
            from etude.callbacks.terminal import LiveTerminal  # imports rich, which only a terminal needs

            self._terminal = LiveTerminal(self._stream)
            atexit.register(self.close)
        elif self._stream is not None and self._given_stream is None and in_notebook():
            self._terminal, self._least_refresh_s = NotebookCell(), max(self.refresh_s, REFRESH_S)
        self._draw()
        self._say(f"{view.title}  {view.subtitle}")

    def on_epoch_begin(self, epoch: int) -> None:
        """Begin a new bar."""
        self._view.epoch, per_epoch = epoch, self._view.steps_per_epoch
        self._epoch_began = time.perf_counter()
        is_inside = self._clock.position > 0 and per_epoch is not None
        self._epoch_first_step = epoch * (per_epoch or 0) if is_inside else self._clock.step
        self._draw()

    def on_step_end(self, report: StepReport) -> None:
        """Draw if a refresh is due."""
        if self._terminal is not None and time.perf_counter() >= self._due:
            self._draw()

    def on_log(self, record: Logs) -> None:
        """Take new metrics."""
        self._view.record = finite(record)
        self._view.groups.update(self._view.record)
        self._update()
        self._view.add_losses(self._view.record, "loss")
        self._say(log_line(self._view))

    def on_validation_begin(self, epoch: int) -> None:
        """Show that validation is running."""
        self._view.validating = True
        self._draw()

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Return to training. Inside an epoch the metrics are shown here; at its end they are part of its row."""
        view = self._view
        view.validating = False
        self._update()
        view.add_losses(finite(metrics), "val_loss")
        if view.steps_per_epoch is None or view.step_in_epoch < view.steps_per_epoch:
            view.groups.close(f"step {view.step}", view.groups.latest | finite(metrics))
            self.note(validation_line(view, finite(metrics)))
            if view.steps_per_epoch is not None:
                self._say_groups()
        self._draw()

    def on_validation_cut_off(self, epoch: int) -> None:
        """Return to training, which is about to end."""
        self._view.validating = False

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add a row to the table."""
        view, numbers = self._view, finite(logs)
        view.groups.close(f"epoch {epoch + 1}", numbers | self._norms)
        self._norms = {}
        own = {name: value for name, value in numbers.items() if "/" not in name}
        row = EpochRow(epoch, time.perf_counter() - self._epoch_began, own, view.phase)
        rows = [*(earlier for earlier in view.rows if earlier.epoch < epoch), row]
        view.rows = keep_rows(rows, judges=view.judges)
        if not self._view.record:  # an epoch is shorter than the distance of log points
            view.add_losses(numbers, "loss")
        self._draw()
        self._say(epoch_line(view, row))
        self._say_groups()

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Show the phase from now on; a notice reports its start."""
        self._view.phase = f"{of_total(facts['number'], facts.get('phases'))} {phase}"
        self._phase_is_new = True
        if (tasks := facts.get("tasks")) is not None:
            self._view.groups.keep(tasks)
        self._view.groups.update({f"{task}/weight": weight for task, weight in (facts.get("weights") or {}).items()})
        self._draw()

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Show the message of a callback; on a terminal the last ones stay."""
        if (norms := facts.get("norms")) is not None:  # tables of groups come from their facts
            self._norms = {f"{group}/grad_norm": norm for group, norm in norms.items()}
        earlier = [text for text in self._view.notices if text != message]
        self._view.notices = [*earlier, message][-MAX_NOTICES:]
        self._due = -math.inf
        self._say(message)

    def on_exception(self, error: BaseException) -> None:
        """Restore the terminal; other code reports the error."""
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self._finish("interrupted" if is_interrupt else "failed", "" if is_interrupt else type(error).__name__)

    def on_train_end(self, result: Logs) -> None:
        """Show the outcome."""
        stopped = self.control.stop
        self._finish("stopped" if stopped else "finished", self.control.reason if stopped else "")

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the tables and the phase, so that a resumed run shows the earlier part."""
        view = self._view
        return {"rows": [asdict(row) for row in view.rows], "tasks": asdict(view.groups), "phase": view.phase}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the state of another version is dropped."""
        if not is_kind(_STATE, state):
            return
        self._view.rows = [EpochRow(**row) for row in state["rows"]]
        self._view.groups, self._view.phase = Groups(**state["tasks"]), state["phase"]

    # --- showing

    def note(self, text: str) -> None:
        """Show a message below the bars, such as what Ctrl-C does; safe to call from a signal handler."""
        self._view.note = text
        self._due = -math.inf  # draw in the next step: the signal may have interrupted drawing
        self._say(text)

    def close(self) -> None:
        """Stop drawing and show the cursor again; safe to call twice."""
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            atexit.unregister(self.close)
            terminal.stop()

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
        now = time.perf_counter()
        self._due = now + max(self._least_refresh_s, (now - begin) / MAX_SHARE)

    def _update(self) -> None:
        """Update the counters and times of the view."""
        view = self._view
        view.elapsed_s, view.step = time.perf_counter() - self._began, self._clock.step
        view.step_in_epoch = max(0, view.step - self._epoch_first_step)
        if view.steps_per_epoch is not None:
            view.step_in_epoch = min(view.step_in_epoch, view.steps_per_epoch)
        if view.total_steps is not None and (done := view.step - self._first_step) > 0:
            view.left_s = view.elapsed_s / done * max(0, view.total_steps - view.step)

    def _finish(self, outcome: str, why: str) -> None:
        self._update()
        self._view.outcome, self._view.note, self._view.validating = outcome, why, False
        self._view.notices, self._phase_is_new = [], False
        self._draw()
        self._say(outcome_line(self._view) + (f": {why}" if why else ""))
        self.close()

    def _say_groups(self) -> None:
        if self._terminal is None and self._stream is not None and self._view.groups.numbers:
            from etude.callbacks.terminal import group_lines

            self._say("\n".join(group_lines(self._view.groups)))

    def _say(self, text: str) -> None:
        """Write a line, if there is no terminal."""
        if self._stream is None or self._terminal is not None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except RuntimeError:  # the signal of this handler interrupted a write
            pass
        except (OSError, ValueError):  # a closed pipe or file
            self._stream = None


def is_terminal(stream: TextIO) -> bool:
    """Return whether a live display is possible: a terminal with cursor movement and more than ASCII."""
    knows_bars = (stream.encoding or "utf-8").lower().startswith("utf")
    return not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb" and knows_bars


def _subtitle(run: RunInfo) -> str:
    device = str(run.device)
    if run.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(run.device)})"
    elif run.device.type == "cpu":
        device += f" ({(threads := torch.get_num_threads())} thread{'s' * (threads != 1)})"
    weights = [(param.numel(), param.requires_grad) for param in run.model.parameters()]
    size, trained = sum(one for one, _ in weights), sum(one for one, is_trained in weights if is_trained)
    parts = [device, parameters_line(size, trained)]
    return ", ".join(parts + [f"resumed at step {run.clock.step:,}"] * run.resumed)
