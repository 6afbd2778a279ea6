"""What every weighting has, and the protocols of those that ask for more."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from etude.core.errors import ConfigError
from etude.core.spelling import suggest


class Weighting(nn.Module, ABC):
    """Turns the losses of several tasks into one objective."""

    known_ahead: ClassVar[bool] = True
    """Whether the coefficients are known before the losses of the step."""
    has_penalty: ClassVar[bool] = False
    """Whether the objective adds something to the weighted losses."""
    layer: str | None = None
    """The layer of the trunk whose gradients it looks at; None: the last one that the tasks share."""

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        if not self.tasks or isinstance(tasks, str):
            raise ConfigError(f"a weighting needs a list of tasks, not {tasks!r}")
        twice = sorted({task for task in self.tasks if self.tasks.count(task) > 1})
        if twice:
            raise ConfigError(f"the tasks of a weighting name '{twice[0]}' twice")

    @abstractmethod
    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the factor of each loss in the objective."""

    def latest(self, scale: Tensor) -> Tensor:
        """Return the coefficients as they are now, or as they were last where only a step finds them."""
        return self.coefficients(torch.zeros_like(scale), scale)

    def penalties(self, scale: Tensor | None = None) -> Tensor | None:
        """Return what the objective adds for each task, (tasks,), or None."""
        return None

    @property
    def device(self) -> torch.device:
        """Where its numbers are."""
        tensor = self._first()
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        tensor = self._first()
        return torch.float32 if tensor is None else tensor.dtype

    @property
    def has_state(self) -> bool:
        """Whether it has numbers of its own: these are to be saved and moved with the model."""
        return self._first() is not None

    def _first(self) -> Tensor | None:
        return next((one for one in (*self.parameters(), *self.buffers())), None)

    def forward(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the objective: `(coefficients · losses).sum()`, and the penalty if there is one."""
        self.check(losses)
        counted = losses if scale is None else torch.where(scale > 0, losses, 0.0)
        objective = (self.coefficients(losses, scale) * counted).sum()
        penalties = self.penalties(scale)
        return objective if penalties is None else objective + penalties.sum()

    def check(self, losses: Tensor) -> None:
        """Raise ConfigError unless there is one loss for each task; looks at shapes only."""
        if losses.shape != (len(self.tasks),):
            raise ConfigError(
                f"the weighting has the tasks {', '.join(self.tasks)}, but the losses have the shape "
                f"{tuple(losses.shape)}; give one loss for each task, in this order"
            )

    def vector(self, values: Mapping[str, float], default: float, what: str) -> Tensor:
        """Return the values by task as a vector; raises ConfigError for an unknown task or a value not finite."""
        for task, value in values.items():
            if task not in self.tasks:
                raise ConfigError(f"{what} names the task '{task}'{suggest(task, self.tasks)}")
            if not math.isfinite(value):
                raise ConfigError(f"{what}: {task} is {value}; give a finite number")
        return torch.tensor([float(values.get(task, default)) for task in self.tasks])


@runtime_checkable
class WatchesEpochs(Protocol):
    """A weighting that looks at the losses of whole epochs."""

    def end_epoch(self, losses: Tensor, scale: Tensor | None = None) -> None:
        """Take in the mean losses of an epoch."""
        ...


@runtime_checkable
class WatchesUpdates(Protocol):
    """A weighting that looks at what an update did to the losses."""

    def after_update(self, before: Tensor, after: Tensor, scale: Tensor | None = None) -> None:
        """Take in the losses of one batch before and after an update of the model."""
        ...


@runtime_checkable
class WatchesGradients(Protocol):
    """A weighting that looks at each task's gradient."""

    def observe(self, losses: Tensor, gradients: Tensor, scale: Tensor | None = None) -> None:
        """Take in the losses and the tasks' gradients (tasks, elements), before any weighting."""
        ...


@runtime_checkable
class CombinesGradients(Protocol):
    """A weighting that makes the gradient of shared parameters itself."""

    def combine(self, gradients: Tensor, *, step: int, scale: Tensor | None = None) -> Tensor:
        """Return one gradient (elements,) of its own, made of the tasks' gradients (tasks, elements), which stay.

        A scale of None says that the gradients are scaled already; those of tasks that take no part are zeros.
        """
        ...


def active(losses: Tensor, scale: Tensor | None) -> Tensor:
    """Return which tasks take part, as booleans."""
    return torch.ones_like(losses, dtype=torch.bool) if scale is None else scale > 0


def scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    """Return the values times the scale, if there is one."""
    return values if scale is None else values * scale


def positive(value: float, what: str) -> float:
    """Return the value; raises ConfigError unless it is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{what} is {value}; give a finite number above 0")
    return value


def not_negative(value: float, what: str) -> float:
    """Return the value; raises ConfigError unless it is finite and 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{what} is {value}; give a finite number, 0 or more")
    return value
