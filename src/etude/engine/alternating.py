"""Steps that take turns, as in a GAN: each turn has its own loss and updates its own parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

from torch import nn

from etude.core import Batch, ConfigError, Task
from etude.core.model import clean_name, unwrap
from etude.core.spelling import names_matching
from etude.distributed.shards import model_param
from etude.engine.objective import Objective, ObjectiveParts


class AlternatingTask(Task):
    """A task whose optimizer steps take turns. Derive from it, set `turns`, and return the terms of `self.turn`.

    In a turn only its parameters require a gradient, so nothing needs to be detached, and only they are updated.
    Which turn it is depends on the number of the step, so a resumed run continues with the right one; in an
    evaluation `turn` is empty.

    >>> class Gan(AlternatingTask):
    ...     turns = {"discriminator": "judge", "generator": ["maker"]}
    ...     steps = {"discriminator": 2}
    >>> [Gan().turn_at(step) for step in range(4)]
    ['discriminator', 'discriminator', 'generator', 'discriminator']
    """

    turns: ClassVar[Mapping[str, str | Sequence[str]]] = {}
    """The parameters that each turn trains, by patterns of names: parameters, or modules such as `generator`.

    Parameters that match none are trained in every turn.
    """
    steps: ClassVar[Mapping[str, int]] = {}
    """Consecutive steps of a turn, 1 by default."""
    uses_all_parameters = False
    turn = ""
    """The name of the current turn; empty in an evaluation."""

    def turn_at(self, step: int) -> str:
        """Return the turn of a step."""
        if not self.turns or any(name not in self.turns or steps < 1 for name, steps in self.steps.items()):
            raise ConfigError(
                f"{type(self).__name__}: turns must name at least one turn, and steps give some of them a number of "
                f"at least 1; found {dict(self.turns)} and {dict(self.steps)}"
            )
        cycle = [name for name in self.turns for _ in range(self.steps.get(name, 1))]
        return cycle[step % len(cycle)]

    def objective(self, parts: ObjectiveParts) -> Objective:
        """Return the objective that gives every step its turn."""
        return AlternatingObjective(self, parts)

    def measuring(self) -> AbstractContextManager[object]:
        """Return the context of an evaluation."""
        return self._in_evaluation()

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        before, self.turn = self.turn, ""
        try:
            yield
        finally:
            self.turn = before


class AlternatingObjective(Objective):
    """Sets the turn of a task, and which parameters require a gradient, before each step."""

    def __init__(self, task: AlternatingTask, parts: ObjectiveParts) -> None:
        super().__init__(task, parts)
        self._alternating = task
        self._turns: dict[nn.Parameter, set[str]] = {}
        self._paused: list[nn.Parameter] = []
        """Parameters of other turns; parameters that are frozen stay so."""
        self._taken = -1
        task.turn_at(0)  # refuses invalid turns early
        trained = {id(model_param(param)) for param in parts.params}
        named = {clean_name(name): param for name, param in unwrap(parts.model).named_parameters()}
        for turn, patterns in task.turns.items():
            for name in names_matching(patterns, named, f"{type(task).__name__}.turns.{turn}"):
                if id(named[name]) in trained:
                    self._turns.setdefault(named[name], set()).add(turn)

    def is_usual(self, step: int) -> bool:
        """Take the turn: this is asked before a recorded step is looked up."""
        self._take_turn(step)
        return True

    def begin(self, micro_batches: Sequence[Batch], step: int) -> None:
        """Take the turn."""
        self._take_turn(step)
        super().begin(micro_batches, step)

    def end_run(self) -> None:
        """Leave a model that can be trained again."""
        self._resume_paused()
        self._taken, self._alternating.turn = -1, ""

    def _resume_paused(self) -> None:
        for param in self._paused:
            param.requires_grad_(True)
        self._paused = []

    def _take_turn(self, step: int) -> None:
        if step == self._taken:
            return
        self._taken, turn = step, self._alternating.turn_at(step)
        self._resume_paused()
        self._paused = [one for one, turns in self._turns.items() if one.requires_grad and turn not in turns]
        for param in self._paused:
            param.requires_grad_(False)
        self._alternating.turn = turn
