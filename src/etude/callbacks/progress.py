"""The progress display: live on a terminal, plain lines in a file. It has no thread and no tensors."""

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NotRequired, TextIO, get_type_hints

import torch

from etude.callbacks.progress_view import (
    Groups,
    Phase,
    Row,
    View,
    epoch_line,
    keep_rows,
    log_line,
    outcome_line,
    validation_line,
)
from etude.callbacks.progress_words import finite, is_metric, to_ascii
from etude.checkpoint import check_kind, record_of
from etude.core import Clock, StepReport
from etude.engine.callback import Callback, Logs, RunInfo

if TYPE_CHECKING:
    from etude.callbacks.terminal import LiveTerminal

NEVER = sys.maxsize
LOOKS = 4
"""How often the clock is read between two refreshes."""
MAX_SHARE = 0.01
"""Share of the run's time that drawing may take: on a slow terminal the display is refreshed less often."""
NOTICE_S = 60.0
"""How long a notice stays in sight on a terminal when others follow it."""
MAX_NOTICES = 3

_STATE = record_of(
    "ProgressDisplay",
    {
        "rows": list[record_of("Row", get_type_hints(Row), total=False)],  # type: ignore[misc]
        "tasks": NotRequired[record_of("Groups", get_type_hints(Groups), total=False)],
        "phase": NotRequired[record_of("Phase", get_type_hints(Phase), total=False) | None],
    },
)


class ProgressDisplay(Callback):
    """Shows name, device, finished epochs, tasks, progress, numbers and the time left.

    On a terminal it draws from `on_step_end`, every `refresh_s` seconds at most; in between a step costs one addition
    and one comparison. Elsewhere it writes one line per log point and epoch, without control characters.
    Output that fails (a closed pipe, a lost terminal) ends the display, never the run.
    """

    shows_notices = True

    def __init__(self, refresh_s: float = 0.25, stream: TextIO | None = None) -> None:
        super().__init__()
        self.refresh_s = self._interval_s = refresh_s
        self._given_stream = stream
        self._stream: TextIO | None = stream if stream is not None else sys.stdout
        self._terminal: LiveTerminal | None = None
        self._clock, self._view = Clock(), View()
        self._began = self._epoch_began = time.perf_counter()
        self._first_step = self._epoch_first_step = 0
        self._steps, self._next_tick = 0, NEVER
        self._ticked, self._drawn_at = (0.0, 0), 0.0
        self._noticed: list[tuple[float, str]] = []
        self._phase_is_new = False
        self._norms: dict[str, float] = {}
        """Of the epoch that ends, by name."""

    # --- hooks

    def on_train_begin(self, run: RunInfo) -> None:
        """Begin to show a run; only the main process does."""
        self._clock, before = run.clock, self._view
        self._view = view = View(run.name, _subtitle(run), run.total_epochs, run.total_steps, run.steps_per_epoch)
        view.epoch = run.clock.epoch
        if run.clock.step:
            view.rows, view.groups = before.rows, before.groups
        if run.clock.step or self._phase_is_new:  # reported by a callback that is listed before the display
            view.phase = before.phase
        self._noticed = []
        self._began = self._epoch_began = time.perf_counter()
        self._first_step = self._epoch_first_step = run.clock.step
        self.close()
        stream = self._given_stream if self._given_stream is not None else sys.stdout
        self._stream = stream if run.is_main else None
        if self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from etude.callbacks.terminal import LiveTerminal  # imports rich, which only a terminal needs

            self._terminal, self._interval_s = LiveTerminal(self._stream), self.refresh_s
            atexit.register(self.close)
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
        """Count, and look at the clock when a refresh may be due."""
        self._steps += 1
        if self._steps >= self._next_tick:
            self._tick()

    def on_log(self, record: Logs) -> None:
        """Take new numbers."""
        self._view.record = dict(record)
        self._view.groups.update(finite(record))
        self._see_phase(record)
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
        """Go back to training. Inside an epoch the numbers are reported here; at its end they are part of its row."""
        view = self._view
        view.validating = False
        self._update()
        if view.steps_per_epoch is None or view.step_in_epoch < view.steps_per_epoch:
            view.groups.close(f"step {view.step}", {**view.groups.latest, **finite(metrics)})
            self.note(validation_line(view, metrics))
            if view.steps_per_epoch is not None:
                self._say_groups()
        else:
            self._draw()

    def on_validation_cut_off(self, epoch: int) -> None:
        """Go back to training, which is about to end."""
        self._view.validating = False

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Add a row to the table."""
        view, numbers = self._view, finite(logs)
        view.groups.close(f"epoch {epoch + 1}", numbers | self._norms)
        self._norms = {}
        self._see_phase(logs)
        row = Row(
            epoch,
            time.perf_counter() - self._epoch_began,
            {name: value for name, value in numbers.items() if is_metric(name)},
            {name: logs[name] for name in ("tokens_per_s", "mfu", "data_wait") if name in logs},
            "" if view.phase is None else f"{view.phase.number} {view.phase.name}".rstrip(),
        )
        view.rows = keep_rows([*(earlier for earlier in view.rows if earlier.epoch < epoch), row])
        self._draw()
        self._say(epoch_line(view, row))
        self._say_groups()

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Show the phase from now on; that it began is said by a notice."""
        self._view.phase, self._phase_is_new = Phase(facts["number"], phase, facts.get("phases")), True
        if (tasks := facts.get("tasks")) is not None:
            self._view.groups.keep(tasks)
        self._view.groups.update({f"{task}/weight": weight for task, weight in (facts.get("weights") or {}).items()})
        self._draw()

    def on_notice(self, message: str, facts: Mapping[str, Any]) -> None:
        """Show what a callback tells the user; on a terminal it stays until others have taken its place for a while."""
        if (norms := facts.get("norms")) is not None:  # of groups, for their table
            self._norms = {f"{group}/grad_norm": norm for group, norm in norms.items()}
        now = time.perf_counter()
        earlier = [(when, text) for when, text in self._noticed if now - when < NOTICE_S and text != message]
        self._noticed = [*earlier, (now, message)][-MAX_NOTICES:]
        self._view.notices = [text for _, text in self._noticed]
        self._draw_soon()
        self._say(message)

    def on_exception(self, error: BaseException) -> None:
        """Leave the terminal as it was; the error itself is for others to report."""
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self._finish("interrupted" if is_interrupt else "failed", "" if is_interrupt else type(error).__name__)

    def on_train_end(self, result: Logs) -> None:
        """Show the outcome."""
        stopped = self.control.stop
        self._finish("stopped" if stopped else "finished", self.control.reason if stopped else "")

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the tables and the phase, so that a resumed run shows what was before."""
        view = self._view
        phase = None if view.phase is None else asdict(view.phase)
        return {"rows": [asdict(row) for row in view.rows], "tasks": asdict(view.groups), "phase": phase}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; checkpoints of runs before there were tasks have rows alone."""
        check_kind(_STATE, state, "state")
        self._view.rows = [Row(**row) for row in state["rows"]]
        self._view.groups = Groups(**state.get("tasks", {}))
        self._view.phase = Phase(**phase) if (phase := state.get("phase")) is not None else None

    # --- showing

    def note(self, text: str) -> None:
        """Show a sentence below the bars, such as what Ctrl-C does; safe to call from a signal handler."""
        self._view.note = text
        self._draw_soon()  # a signal may have come in the middle of drawing
        self._say(text)

    def close(self) -> None:
        """Stop drawing and give the cursor back; safe to call twice."""
        terminal, self._terminal, self._next_tick = self._terminal, None, NEVER
        if terminal is not None:
            atexit.unregister(self.close)
            terminal.stop()

    def _tick(self) -> None:
        """Draw if it is time, and guess from the pace of the last steps when to look again."""
        now, (then, first) = time.perf_counter(), self._ticked
        stretch = self._steps - first
        self._ticked = (now, self._steps)
        if now - self._drawn_at >= self._interval_s:
            self._draw()
        if self._terminal is not None:
            # Four looks per refresh, and at most twice the last stretch: steps that become slow do not freeze it.
            guess = int(stretch / max(now - then, 1e-9) * self._interval_s / LOOKS)
            self._next_tick = self._steps + max(1, min(guess, 2 * stretch))

    def _draw_soon(self) -> None:
        """Let the next step draw."""
        if self._terminal is not None:
            self._drawn_at, self._next_tick = -math.inf, 0

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

    def _see_phase(self, record: Logs) -> None:
        """Follow the number of the phase, where its name is not known."""
        number, phase = record.get("phase"), self._view.phase
        if number is not None and (phase is None or phase.number != int(number)):
            self._view.phase = Phase(int(number), total=None if phase is None else phase.total)

    def _say_groups(self) -> None:
        if self._terminal is None and self._stream is not None and self._view.groups.numbers:
            from etude.callbacks.terminal import group_texts

            self._say("\n".join(group_texts(self._view.groups)))

    def _say(self, text: str) -> None:
        """Write a line, where there is no terminal to draw on."""
        if self._stream is None or self._terminal is not None:
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


def _subtitle(run: RunInfo) -> str:
    device = str(run.device)
    if run.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(run.device)})"
    elif run.device.type == "cpu":
        device += f" ({(threads := torch.get_num_threads())} thread{'s' * (threads != 1)})"
    parts = [device, f"{sum(p.numel() for p in run.model.parameters()):,} parameters"]
    return ", ".join(parts + [f"resumed at step {run.clock.step:,}"] * run.resumed)
