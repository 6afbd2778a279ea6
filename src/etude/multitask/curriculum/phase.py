"""A phase of a curriculum: when it begins, what it trains, and how new tasks are introduced."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from etude.core.errors import ConfigError
from etude.core.spelling import nearest, suggest

ALL = "all"
"""Value of `tasks` for a phase that trains every defined task."""
_STRICT = {"extra": "forbid"}
"""Used by pydantic when it builds these classes from a file: unknown keys are errors."""


@dataclass(frozen=True, slots=True)
class Start:
    """When a phase begins: at an epoch, after a number of steps, or when a metric reaches a value.

    >>> Start(epoch=11).text
    'epoch 11'
    >>> Start(metric="val_loss", below=2.5).text
    'val_loss <= 2.5'
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = _STRICT

    epoch: int | None = None
    """The first epoch of the phase, counted from 1."""
    step: int | None = None
    """The number of optimizer steps taken before the phase."""
    metric: str | None = None
    """The metric that starts the phase; requires `below` or `above`."""
    below: float | None = None
    """The phase begins once the metric is at or below this."""
    above: float | None = None
    """The phase begins once the metric is at or above this."""

    def __post_init__(self) -> None:
        ways = [name for name in ("epoch", "step", "metric") if getattr(self, name) is not None]
        bounds = [value for value in (self.below, self.above) if value is not None]
        if len(ways) != 1 or len(bounds) != (self.metric is not None) or not all(map(math.isfinite, bounds)):
            raise ConfigError(
                "a phase needs exactly one start: epoch, step, or metric with a finite number below or above; "
                f"found {' and '.join(ways) or 'none'}, and {bounds or 'no number'}"
            )
        if (self.epoch is not None and self.epoch < 1) or (self.step is not None and self.step < 0):
            raise ConfigError(f"a phase begins at {self.text}, but the first epoch is 1 and the first step is 0")

    @property
    def fixed(self) -> bool:
        """Whether the start is known in advance."""
        return self.metric is None

    @property
    def text(self) -> str:
        """The start as text."""
        if self.epoch is not None:
            return f"epoch {self.epoch}"
        if self.step is not None:
            return f"step {self.step}"
        return f"{self.metric} <= {self.below}" if self.below is not None else f"{self.metric} >= {self.above}"

    def reached(self, epoch: float, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the phase may begin now. A missing or NaN metric never starts it."""
        if self.epoch is not None:
            return epoch >= self.epoch
        if self.step is not None:
            return step >= self.step
        value = metrics.get(self.metric or "", math.nan)
        return value <= self.below if self.below is not None else value >= (self.above or 0.0)


@dataclass(frozen=True, slots=True)
class Ramp:
    """How the weight of a new task grows: linearly from `start` to 1, over `epochs`, or over `steps` if given.

    >>> [round(Ramp().at(epochs=passed, steps=0), 2) for passed in range(7)]
    [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.0]
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = _STRICT

    start: float = 0.1
    """The initial factor of a new task."""
    epochs: float = 5.0
    """Epochs until a new task has its full weight; 0: immediately."""
    steps: int | None = None
    """Steps until a new task has its full weight, instead of epochs."""

    def __post_init__(self) -> None:
        if not (0 <= self.start <= 1 and 0 <= self.epochs < math.inf and (self.steps or 0) >= 0):
            raise ConfigError(f"a ramp must start between 0 and 1 and take 0 or more epochs or steps, found {self}")

    def at(self, epochs: float, steps: int) -> float:
        """Return the factor this many epochs and steps after the task was added."""
        passed, length = (epochs, self.epochs) if self.steps is None else (steps, self.steps)
        if passed >= length:
            return 1.0
        return self.start + (1.0 - self.start) * max(0.0, passed / length)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of training with the same tasks. It lasts until the next phase begins.

    >>> Phase("warm-up", 1, ["code_generation"]).start
    Start(epoch=1, step=None, metric=None, below=None, above=None)
    """

    __pydantic_config__: ClassVar[Mapping[str, str]] = _STRICT

    name: str
    start: Start | int
    """When it begins; a number is an epoch, counted from 1."""
    tasks: Sequence[str] | str
    """All tasks that are trained, not only new ones; "all" for every defined task."""
    ramp: Ramp = field(default_factory=Ramp)
    """How the weights of new tasks grow to their full value."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """The variant of a task in this phase: {"code_generation": "masked"}."""
    mixture: Mapping[str, float] | None = None
    """The proportions of the data sources; None: those of the data section."""
    sequence_length: int | None = None
    """The length of sequences; None: that of the data section."""
    lr_scale: float = 1.0
    """A factor of the learning rate."""

    def __post_init__(self) -> None:
        if isinstance(self.start, int):
            object.__setattr__(self, "start", Start(epoch=self.start))
        if isinstance(self.tasks, str) and self.tasks != ALL:
            raise ConfigError(f"phase '{self.name}': tasks is '{self.tasks}'; use a list of names, or '{ALL}'")
        if not isinstance(self.tasks, str):
            object.__setattr__(self, "tasks", tuple(dict.fromkeys(self.tasks)))
        if not self.name or not self.tasks:
            raise ConfigError(f"phase '{self.name}' has no name or no tasks; set both, or remove the phase")
        for source, weight in (self.mixture or {}).items():
            check_weight(weight, f"phase '{self.name}': the mixture weight of '{source}'")
        if self.mixture is not None and not any(self.mixture.values()):
            raise ConfigError(f"phase '{self.name}': no source of the mixture has a weight above 0")
        if self.sequence_length is not None and self.sequence_length < 1:
            raise ConfigError(
                f"phase '{self.name}': sequence_length is {self.sequence_length}; it must be at least 1"
            )
        check_weight(self.lr_scale, f"phase '{self.name}': lr_scale")

    @property
    def begins(self) -> Start:
        """The start, never a plain number."""
        assert isinstance(self.start, Start)
        return self.start


def check_spelling(names: Iterable[str], tasks: Collection[str]) -> None:
    """Raise ConfigError for a name that looks like a misspelt task; exact names are fine."""
    given = tuple(names)
    missing = [task for task in tasks if task not in given]
    for name in given:
        if name not in tasks and nearest(name, missing, cutoff=0.8):
            raise ConfigError(f"the weights name the unknown task '{name}'{suggest(name, tasks)}")


def check_weight(weight: float, what: str) -> float:
    """Return the weight; raise ConfigError unless it is finite and at least 0."""
    if not 0 <= weight < math.inf:
        raise ConfigError(f"{what} is {weight}; it must be finite and at least 0")
    return weight
