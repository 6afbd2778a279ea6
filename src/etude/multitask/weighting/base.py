"""The base class of weightings, and the tasks' gradients as rows of a matrix."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from etude.core.errors import ConfigError
from etude.core.spelling import suggest

Needs = Literal["nothing", "losses", "updates", "layer_gradients", "gradients"]


class Weighting(nn.Module):
    """Turns the losses of several tasks into one objective."""

    needs: ClassVar[Needs] = "nothing"
    """What a step must pass to it.

    nothing           the coefficients are known before the step
    losses            the losses of the step, for `coefficients`
    updates           the same, and for `after_update` the losses after the update
    layer_gradients   for `observe`, each task's gradient of a shared layer
    gradients         for `combine`, each task's gradient of all shared parameters
    """
    has_penalty: ClassVar[bool] = False
    """Whether the objective adds a penalty to the weighted losses."""
    layer: str | None = None
    """The layer of the trunk whose gradients it uses; None: the last one that the tasks share."""

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__()
        self.tasks = tuple(tasks)
        if not self.tasks or isinstance(tasks, str):
            raise ConfigError(f"a weighting needs a list of tasks, not {tasks!r}")
        twice = sorted({task for task in self.tasks if self.tasks.count(task) > 1})
        if twice:
            raise ConfigError(f"the tasks of a weighting name '{twice[0]}' twice")

    @property
    def known_ahead(self) -> bool:
        """Whether the coefficients are known before the losses of the step."""
        return self.needs not in ("losses", "updates")

    def coefficients(self, losses: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the factor of each loss in the objective: the weights, times the scale."""
        weights = self.weights_of(losses, scale)
        return weights if scale is None else weights * scale

    def weights_of(self, losses: Tensor, scale: Tensor | None) -> Tensor:
        """Return the weights before scaling; those of inactive tasks do not matter."""
        return torch.ones_like(losses).detach()

    def latest(self, scale: Tensor) -> Tensor:
        """Return the current coefficients, or those of the last step if they depend on it."""
        return self.coefficients(torch.zeros_like(scale), scale)

    def penalties(self, scale: Tensor | None = None) -> Tensor | None:
        """Return the penalty of each task, (tasks,), or None."""
        found = self.penalties_of()
        return found if found is None or scale is None else found * scale

    def penalties_of(self) -> Tensor | None:
        """Return the penalty before scaling."""
        return None

    # --- what a step passes to it

    def end_epoch(self, losses: Tensor, scale: Tensor | None = None) -> None:
        """Process the mean losses of an epoch."""

    def after_update(self, before: Tensor, after: Tensor, scale: Tensor | None = None) -> None:
        """Process the losses of one batch before and after an update of the model."""

    def observe(self, losses: Tensor, gradients: Tensor, scale: Tensor | None = None) -> None:
        """Process the losses and the tasks' unweighted gradients (tasks, elements)."""

    def combine(self, gradients: Tensor, *, step: int, scale: Tensor | None = None) -> Tensor:
        """Return one new gradient (elements,) combined from those of the tasks (tasks, elements)."""
        if scale is None:
            return self.merge(gradients, step, torch.ones_like(gradients[:, 0], dtype=torch.bool))
        return self.merge(torch.where(scale[:, None] > 0, gradients, 0.0) * scale[:, None], step, scale > 0)

    def merge(self, gradients: Tensor, step: int, active: Tensor) -> Tensor:
        """Return the same for gradients that are already scaled; those of inactive tasks are zeros."""
        raise NotImplementedError(f"{type(self).__name__} does not combine gradients")

    # --- device and dtype

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        tensor = self._first()
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        tensor = self._first()
        return torch.float32 if tensor is None else tensor.dtype

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
        """Raise ConfigError unless there is one loss per task; only shapes are checked."""
        if losses.shape != (len(self.tasks),):
            raise ConfigError(
                f"the weighting has the tasks {', '.join(self.tasks)}, but the losses have the shape "
                f"{tuple(losses.shape)}; pass one loss per task, in this order"
            )

    def vector(self, values: Mapping[str, float], default: float, what: str) -> Tensor:
        """Return the values by task as a vector; raises ConfigError for an unknown task or a non-finite value."""
        for task, value in values.items():
            if task not in self.tasks:
                raise ConfigError(f"{what} names the task '{task}'{suggest(task, self.tasks)}")
            if not math.isfinite(value):
                raise ConfigError(f"{what}: {task} is {value}; it must be finite")
        return torch.tensor([float(values.get(task, default)) for task in self.tasks])


def is_active(losses: Tensor, scale: Tensor | None) -> Tensor:
    """Return which tasks are active, as booleans."""
    return torch.ones_like(losses, dtype=torch.bool) if scale is None else scale > 0


def positive(value: float, what: str) -> float:
    """Return the value; raises ConfigError unless it is finite and above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} is {value}; it must be finite and above 0")
    return value


def assign_gradients(gradient: Tensor, parameters: Sequence[Tensor]) -> None:
    """Assign the slices of one vector as gradients of the parameters."""
    start = 0
    for parameter in parameters:
        piece = gradient[start : start + parameter.numel()].view_as(parameter).to(parameter.dtype)
        # Fused kernels read a gradient in the layout of its parameter, such as channels_last.
        parameter.grad = piece if parameter.is_contiguous() else torch.empty_like(parameter).copy_(piece)
        start += parameter.numel()
    assert start == gradient.numel(), f"{gradient.numel()} numbers for {start} elements"
