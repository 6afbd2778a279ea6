"""Apply a curriculum to a run: start its phases, set task weights, data and learning rate."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from etude.callbacks.lr_schedule import LRSchedule
from etude.callbacks.monitored import with_other_names
from etude.checkpoint import check_kind, record_of
from etude.core import Clock, ConfigError, EtudeError
from etude.core.loader import ChoosesStreams
from etude.core.spelling import suggest
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.multitask.curriculum import Begun, Curriculum, Phase, PhaseStart
from etude.multitask.task import MultiTask

_STATE = record_of(
    "Curriculum", {"begun": list[dict[str, Any]], "epoch": int, "step": int, "measured": dict[str, float]}
)


class CurriculumCallback(Callback):
    """Sets the tasks, weights, data and learning rate of each step from its curriculum. It is the first callback.

    It changes the task, the loaders and the learning rate of the run. For a list of phases, the task weights are
    those of the task.

    A phase begins before a step, never between a step and the validation after it: at the beginning of an epoch, or
    inside one when a number of steps or a validation metric is reached. Metrics of an epoch, a log point and a
    checkpoint include the `phase` in which they were measured.

    A phase sets the active tasks, and what the training loader reads, including the sequence length. For the
    validation loader it sets only the streams, so that validation always uses the same samples of a stream. All this
    depends only on epoch, step and the phases that have begun, so a resumed run continues identically.

    Each phase is reported once: to the user, to the run folder as an event of kind "phase", to the other callbacks by
    `on_phase_begin`. A phase that began after the checkpoint that a run resumes from begins again.
    """

    def __init__(self, curriculum: Curriculum | Sequence[Phase]) -> None:
        super().__init__()
        phases = curriculum.phases if isinstance(curriculum, Curriculum) else curriculum
        if not isinstance(phases, Sequence) or not all(isinstance(phase, Phase) for phase in phases):
            raise ConfigError(f"a curriculum is a Curriculum or a list of Phases, found {curriculum!r:.60}")
        self._given = curriculum
        self.state: Begun = ()
        """The phases that have begun."""
        self._scales = any(phase.lr_scale != 1 for phase in phases)
        self._clock = Clock()
        self._is_main = True
        self._moment = (1, 0)
        """The epoch, counted from 1, and the step that the current weights are for."""
        self._measured: dict[str, float] = {}
        """Metrics that phases wait for, since the last step."""
        self._missed: set[str] = set()
        self._next_step = 0
        if any(phase.begins.epoch is None or phase.ramp.steps for phase in phases[1:]):
            self.on_step_begin = self._before_step  # type: ignore[method-assign]  # else a step costs nothing

    def bind(self, parts: RunParts) -> None:
        """Take the task, the loaders and the learning rate of the run."""
        if not isinstance(parts.task, MultiTask):
            raise ConfigError(
                f"a curriculum ({type(self).__name__}) needs several tasks, but {type(parts.task).__name__} is a "
                f"single task; pass task=MultiTask({{...}}), or remove the curriculum"
            )
        curriculum = self._given
        if not isinstance(curriculum, Curriculum):
            curriculum = Curriculum(curriculum, {name: spec.weight for name, spec in parts.task.tasks.items()})
        self.curriculum, self.task, self._learning_rate = curriculum, parts.task, parts.learning_rate
        self._loader, self._val_loader = _choosing(parts.train_loader), _choosing(parts.val_loader)
        self._validates = parts.val_loader is not None

    def acts_in_steps(self) -> bool:
        """True: it changes what a step trains."""
        return True

    @contextmanager
    def trying(self, clock: Clock) -> Iterator[None]:
        """Activate the tasks of the phase at this time, then all tasks again; a loaded run is in its phase already."""
        if self.state:
            yield
            return
        at = clock.epoch + 1, clock.step
        begun = self.curriculum.advance((), *at)
        self._switch(self.curriculum.current_phase(*at, begun), self.curriculum.loss_weights(*at, begun))
        try:
            yield
        finally:
            self.task.activate({name: spec.weight for name, spec in self.task.tasks.items()})
            for loader in (self._loader, self._val_loader):
                if loader is not None:
                    loader.choose(only=self.task.streams())

    # --- hooks

    def on_train_begin(self, run: RunInfo) -> None:
        """Check that every phase can be applied; reset if the run starts."""
        self._clock, self._is_main = run.clock, run.is_main
        if not run.resumed:
            self.state, self._measured, self._missed = (), {}, set()
            self._moment = (run.clock.epoch + 1, run.clock.step)
        for words in self.curriculum.too_late(self.state) if run.is_main else ():
            self.notify(words)
        self._rehearse()

    def on_epoch_begin(self, epoch: int) -> None:
        """Begin the phases of this epoch; update ramps that count epochs."""
        # In a resumed epoch nothing begins until it is certain that a step is left.
        if self._clock.position == 0 or not self.state:
            self._go_on(epoch)

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Record the metrics that phases wait for; a phase they trigger begins before the next step."""
        self._take(metrics, expected=lambda name: name.startswith("val_"))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Record the metrics that phases wait for."""
        self._take(logs, expected=lambda name: not (self._validates and name.startswith("val_")))

    def _before_step(self, step: int) -> None:
        if step >= self._next_step or self._measured:
            self._go_on(self._clock.epoch)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return when phases began, and the epoch and step of the current weights."""
        epoch, step = self._moment
        return {
            "begun": [entry._asdict() for entry in self.state],
            "epoch": epoch,
            "step": step,
            "measured": dict(self._measured),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` and apply its phase."""
        check_kind(_STATE, state, "state")
        self.state = tuple(PhaseStart(**entry) for entry in state["begun"])
        self._moment, self._measured = (state["epoch"], state["step"]), dict(state["measured"])
        if self.state:
            self._apply(self.state)

    # --- phases

    def _go_on(self, epoch: int) -> None:
        """Begin the phases that are due, and apply them from this step on."""
        before, step = self.state, self._clock.step
        self._moment = (epoch + 1, step)
        self.state = self.curriculum.advance(before, *self._moment, self._measured)
        self._measured = {}
        self._apply(self.state, self._clock.position)
        for count in range(len(before) + 1, len(self.state) + 1):
            self._announce(self.state[:count])

    def _apply(self, state: Begun, position: int | None = None) -> None:
        """Set tasks, data (from this position of the epoch on) and learning rate for the current step."""
        epoch, step = self._moment
        phase = self.curriculum.current_phase(epoch, step, state)
        self._clock.phase = self._number(phase)
        change = self.curriculum.next_change(step, state)
        self._next_step = sys.maxsize if change is None else change
        if self._scales and self._learning_rate is not None:
            self._learning_rate.scales["phase"] = phase.lr_scale
        self._switch(phase, self.curriculum.loss_weights(epoch, step, state), position)

    def _switch(self, phase: Phase, weights: Mapping[str, float], position: int | None = None) -> None:
        """Activate the tasks of a phase, and choose their data."""
        self.task.activate(weights, phase.variants)
        self.task.in_phase = True
        only = self.task.streams()
        if self._val_loader is not None:
            self._val_loader.choose(only=only)
        if self._loader is not None:
            self._loader.choose(phase.mixture, phase.sequence_length, only, position)

    def _announce(self, state: Begun) -> None:
        """Report the phase that began last to the callbacks and to the user."""
        phase = self.curriculum.current_phase(*self._moment, state)
        facts = self._facts(phase, state)
        if self._siblings is not None:
            self._siblings.on_phase_begin(phase.name, facts)
        if self._is_main:
            self.notify(_words(facts), event="phase", **facts)

    def _facts(self, phase: Phase, state: Begun) -> dict[str, Any]:
        epoch, step = self._moment
        tasks = self.curriculum.active_tasks(phase)
        earlier = state[:-1]
        before = self.curriculum.active_tasks(epoch, step, earlier) if earlier else ()
        return {
            "phase": phase.name,
            "number": self._number(phase),
            "phases": len(self.curriculum.phases),
            "tasks": list(tasks),
            "new_tasks": [task for task in tasks if task not in before],
            "weights": self.curriculum.loss_weights(epoch, step, state),
            "variants": dict(phase.variants),
            "mixture": None if phase.mixture is None else dict(phase.mixture),
            "sequence_length": phase.sequence_length,
            "lr_scale": phase.lr_scale,
            "epoch": epoch - 1,
            "step": step,
        }

    def _number(self, phase: Phase) -> int:
        return self.curriculum.phases.index(phase) + 1

    # --- metrics

    def _take(self, logs: Logs, expected: Callable[[str], bool]) -> None:
        """Remember the metrics that phases wait for; warn once if an expected one is missing."""
        waiting = [phase for phase in self.curriculum.upcoming(self.state) if not phase.begins.fixed]
        if not waiting:
            return
        named = with_other_names(logs)
        for phase in waiting:
            name = phase.begins.metric or ""
            if math.isfinite(named.get(name, math.nan)):
                self._measured[name] = named[name]
        phase = self.curriculum.upcoming(self.state)[0]
        name = phase.begins.metric or ""
        if name and name not in named and name not in self._missed and expected(name):
            self._missed.add(name)
            if self._is_main:
                known = suggest(name, sorted(logs))
                self.notify(f"phase '{phase.name}' waits for '{name}', which is not reported{known}")

    # --- checks

    def _rehearse(self) -> None:
        """Try every phase now, so that a mistake in a late one is found before the first step."""
        for phase in self.curriculum.phases:
            self._check(phase)
            weights = {task: self.curriculum.weights[task] for task in self.curriculum.active_tasks(phase)}
            try:
                self._switch(phase, weights)
            except EtudeError as error:
                raise type(error)(f"phase '{phase.name}': {error}") from error
        started = self.state or self.curriculum.advance(self.state, *self._moment)
        self._apply(started)

    def _check(self, phase: Phase) -> None:
        asked = [name for name in ("mixture", "sequence_length") if getattr(phase, name) is not None]
        if asked and self._loader is None:
            raise ConfigError(
                f"phase '{phase.name}' sets {' and '.join(asked)}, but the training data has no streams to choose; "
                f"use data of named streams (data: streams), or remove {' and '.join(asked)}"
            )
        if phase.lr_scale == 1:
            return
        driven = self._siblings is not None and any(isinstance(one, LRSchedule) for one in self._siblings)
        if driven or self._learning_rate is None:
            why = "a torch scheduler sets the learning rate" if driven else "no learning rate is given to scale"
            raise ConfigError(
                f"phase '{phase.name}' has lr_scale {phase.lr_scale:g}, but {why}; "
                f"use a scheduler of etude, or remove lr_scale"
            )


def _words(facts: Mapping[str, Any]) -> str:
    """Describe a phase in one line.

    >>> facts = {"phase": "both", "number": 2, "phases": 3, "tasks": ["code", "tests"], "new_tasks": ["tests"]}
    >>> facts |= {"weights": {"code": 1.0, "tests": 0.1}, "variants": {"code": "masked"}, "lr_scale": 0.5}
    >>> _words(facts | {"mixture": {"a": 1.0, "b": 3.0}, "sequence_length": 128})
    'phase 2 of 3, both: code (masked), tests (new, weight 0.1); mixture a 1, b 3; sequence length 128; lr x 0.5'
    """
    tasks = []
    for task in facts["tasks"]:
        remarks = [facts["variants"][task]] if task in facts["variants"] else []
        if task in facts["new_tasks"] and facts["new_tasks"] != facts["tasks"]:
            remarks += ["new", f"weight {facts['weights'][task]:.3g}"]
        tasks.append(f"{task} ({', '.join(remarks)})" if remarks else task)
    words = [f"phase {facts['number']} of {facts['phases']}, {facts['phase']}: {', '.join(tasks)}"]
    if facts["mixture"] is not None:
        words.append("mixture " + ", ".join(f"{name} {share:g}" for name, share in facts["mixture"].items()))
    if facts["sequence_length"] is not None:
        words.append(f"sequence length {facts['sequence_length']}")
    if facts["lr_scale"] != 1:
        words.append(f"lr x {facts['lr_scale']:g}")
    return "; ".join(words)


def _choosing(loader: object) -> ChoosesStreams | None:
    return loader if isinstance(loader, ChoosesStreams) else None
