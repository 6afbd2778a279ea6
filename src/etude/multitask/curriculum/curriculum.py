"""A curriculum: an ordered list of phases, which of them have begun, and the tasks and weights at any time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from etude.core.errors import CheckpointError, ConfigError
from etude.core.spelling import suggest
from etude.multitask.curriculum.phase import ALL, Phase, Ramp, Start, check_weight


class PhaseStart(NamedTuple):
    """When a phase began."""

    phase: str
    epoch: float
    """The epoch at which it began, counted from 1; a fraction if that was inside an epoch."""
    step: int
    """The number of steps taken by then."""


Begun = tuple[PhaseStart, ...]
"""The state of a curriculum: the phases that have begun, in order. `Curriculum.advance` returns the next one."""


class Curriculum:
    """Phases, and the tasks they train.

    `tasks` are the names of all tasks, or a mapping from names to static weights; by default all tasks that the
    phases name. Every method is a pure function of epoch, step and, if phases begin by a metric (or by a step with a
    ramp in epochs), the state that `advance` returns, so results are the same after a resume.

    A task is new in a phase if the previous phase did not train it; its weight then follows the ramp of the phase.
    The tasks of the first phase have their full weight from the start. A phase that begins by a metric is skipped if
    a later one with a fixed start begins first.

    >>> phases = [Phase("a", 1, ["code"]), Phase("b", 3, ["code", "tests"])]
    >>> curriculum = Curriculum(phases, {"code": 1.0, "tests": 0.5})
    >>> curriculum.current_phase(2).name, curriculum.active_tasks(3)
    ('a', ('code', 'tests'))
    >>> curriculum.loss_weights(3)
    {'code': 1.0, 'tests': 0.05}
    """

    def __init__(self, phases: Sequence[Phase], tasks: Mapping[str, float] | Iterable[str] | None = None) -> None:
        self.phases = tuple(phases)
        if tasks is None:
            tasks = [name for phase in self.phases if phase.tasks != ALL for name in phase.tasks]
        self.weights = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks, 1.0)
        _check_phases(self.phases)
        _check_tasks(self.phases, self.weights)
        self._places = {phase.name: place for place, phase in enumerate(self.phases)}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of all tasks."""
        return tuple(self.weights)

    def advance(self, state: Begun, epoch: float, step: int = 0, metrics: Mapping[str, float] | None = None) -> Begun:
        """Return the state with the phases that begin now; the same state if none does.

        Phases with a fixed start are recorded at that start, however late this is called.
        """
        _check_epoch(epoch)
        starts, place, waiting = list(state), self._place(state) + 1, False
        for phase in self.phases[place:]:
            start = phase.begins
            if not start.reached(epoch, step, metrics or {}):
                if start.fixed:
                    break
                waiting = True  # only a fixed start may skip it
            elif start.fixed or not waiting:
                at = (float(start.epoch or epoch), step if start.step is None else start.step)
                starts.append(PhaseStart(phase.name, *at))
                waiting = False
        return tuple(starts) if len(starts) > len(state) else state

    def current_phase(self, epoch: float, step: int = 0, state: Begun | None = None) -> Phase:
        """Return the current phase."""
        return self.phases[self._place(self._state(epoch, step, state))]

    def active_tasks(self, at: Phase | float, step: int = 0, state: Begun | None = None) -> tuple[str, ...]:
        """Return the tasks of a phase, or of the phase at an epoch, in definition order."""
        phase = at if isinstance(at, Phase) else self.current_phase(at, step, state)
        return self.tasks if phase.tasks == ALL else tuple(name for name in self.tasks if name in phase.tasks)

    def loss_weights(self, epoch: float, step: int = 0, state: Begun | None = None) -> dict[str, float]:
        """Return the weight of every active task: its static weight times its ramp factor."""
        state = self._state(epoch, step, state)
        factors: dict[str, float] = {}
        for number, entry in enumerate(state):
            phase = self.phases[self._places[entry.phase]]
            came_in = 1.0 if number == 0 else phase.ramp.at(epoch - entry.epoch, step - entry.step)
            factors = {task: factors.get(task, came_in) for task in self.active_tasks(phase)}
        return {task: self.weights[task] * factor for task, factor in factors.items()}

    def upcoming(self, state: Begun) -> tuple[Phase, ...]:
        """Return the phases that may still begin."""
        return self.phases[self._place(state) + 1 :]

    def too_late(self, state: Begun) -> list[str]:
        """Return a sentence for each phase that has begun at another time than the one that is set now.

        >>> Curriculum([Phase("a", 1, ["x"]), Phase("b", 5, ["x"])]).too_late((PhaseStart("b", 3.0, 40),))
        ["phase 'b' has begun already, so there is no effect of its start at epoch 5"]
        """
        begun = [(self.phases[self._places[entry.phase]], entry) for entry in state]
        return [
            f"phase '{phase.name}' has begun already, so there is no effect of its start at {phase.begins.text}"
            for phase, entry in begun
            if phase.begins.epoch not in (None, entry.epoch) or phase.begins.step not in (None, entry.step)
        ]

    def next_change(self, step: int, state: Begun) -> int | None:
        """Return the next step after `step` at which the phase or a weight changes by steps alone; None if never.

        >>> from etude.multitask.curriculum import Ramp
        >>> curriculum = Curriculum([Phase("a", 1, ["x"]), Phase("b", Start(step=10), ["x", "y"], Ramp(steps=3))])
        >>> state = curriculum.advance((), epoch=1, step=4)
        >>> curriculum.next_change(4, state)
        10
        >>> state = curriculum.advance(state, epoch=1, step=10)
        >>> [curriculum.next_change(step, state) for step in (10, 11, 12, 13)]
        [11, 12, 13, None]
        """
        for entry in state[1:]:
            length = self.phases[self._places[entry.phase]].ramp.steps
            if length is not None and step < entry.step + length:
                return step + 1
        for phase in self.upcoming(state):
            if phase.begins.fixed:  # it blocks all later phases
                return phase.begins.step
        return None

    def _state(self, epoch: float, step: int, state: Begun | None) -> Begun:
        if state:
            _check_epoch(epoch)
            return state
        for phase in self.phases[1:]:
            # The epoch of a step is unknown here: a ramp in the other unit would start at the wrong time.
            start, ramp = phase.begins, phase.ramp
            same_unit = (start.step is None) == (ramp.steps is None) or start == Start(epoch=1)
            if not start.fixed or not (same_unit or ramp == Ramp(ramp.start, 0) or ramp.steps == 0):
                raise ConfigError(
                    f"phase '{phase.name}' begins at {start.text} with {ramp}, which needs more than epoch and "
                    "step; pass the state that Curriculum.advance returns, or use the same unit for ramp and start"
                )
        return self.advance((), epoch, step)

    def _place(self, state: Begun) -> int:
        if not state:
            return -1
        unknown = [entry.phase for entry in state if entry.phase not in self._places]
        if unknown:
            raise CheckpointError(
                f"the saved curriculum is in phase '{unknown[0]}', which is not defined"
                f"{suggest(unknown[0], self._places)}; keep the names of phases that have begun"
            )
        return self._places[state[-1].phase]


def _check_epoch(epoch: float) -> None:
    if not 1 <= epoch < math.inf:
        raise ConfigError(f"epoch {epoch}: epochs are counted from 1")


def _check_phases(phases: tuple[Phase, ...]) -> None:
    if not phases or phases[0].begins not in (Start(epoch=1), Start(step=0)):
        first = f"'{phases[0].name}' begins at {phases[0].begins.text}" if phases else "there are no phases"
        raise ConfigError(f"the first phase of a curriculum must begin at epoch 1 or step 0, but {first}")
    names = [phase.name for phase in phases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two phases are named '{twice[0]}'; rename one of them")
    for unit in ("epoch", "step"):
        timed = [(phase, at) for phase in phases if (at := getattr(phase.begins, unit)) is not None]
        for (earlier, first), (later, second) in pairwise(timed):
            if first >= second:
                raise ConfigError(
                    f"phase '{later.name}' begins at {later.begins.text}, not after '{earlier.name}' "
                    f"({earlier.begins.text}), which is listed before it; list phases in the order in which they "
                    "begin"
                )


def _check_tasks(phases: tuple[Phase, ...], weights: Mapping[str, float]) -> None:
    for task, weight in weights.items():
        check_weight(weight, f"the weight of task '{task}'")
    if not weights:
        raise ConfigError("no tasks are defined for the curriculum; define at least one")
    for phase in phases:
        named = () if phase.tasks == ALL else phase.tasks
        for task in (*named, *phase.variants):
            if task not in weights:
                known = suggest(task, weights)
                raise ConfigError(f"phase '{phase.name}' names the task '{task}', which is not defined{known}")
