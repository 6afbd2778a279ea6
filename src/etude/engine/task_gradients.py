"""Each task's own gradient of the parameters that tasks share."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from etude.core import Batch, Terms, TrainingError
from etude.core.calling import unwrap
from etude.distributed import World
from etude.engine.callback import TaskGradients
from etude.engine.precision import Precision

Counts = Mapping[str, Tensor | float]
LOSS = "/loss"
"""How the terms of the tasks' losses end: `<task>/loss`."""


@runtime_checkable
class SharesParameters(Protocol):
    """A model of several tasks that says which of its parameters they share."""

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return all of them."""
        ...

    def last_shared_layer(self, batch: Batch) -> str:
        """Return the name of the last layer that they share, as the batch is run."""
        ...

    def layer_parameters(self, layer: str) -> list[nn.Parameter]:
        """Return the trainable parameters of a layer; raise ConfigError if there is none of that name."""
        ...


class TaskRows:
    """The gradients of the tasks' mean losses, added up over the micro-batches of a step: a row for each task."""

    def __init__(self, params: Sequence[nn.Parameter], world: World, precision: Precision) -> None:
        self.params = params
        self._world, self._precision = world, precision
        self.rows: dict[str, Tensor] = {}
        self.reached = [0] * len(params)
        """1 for every parameter that a task here uses."""

    def add(self, terms: Terms, totals: Counts) -> None:
        """Add the gradients of these terms, one backward pass for each task; the graph is kept."""
        for name, term in terms.items():
            if not name.endswith(LOSS):
                continue
            task = name.removesuffix(LOSS)
            row = self._gradient(term.sum / totals[name])
            self.rows[task] = row if task not in self.rows else self.rows[task] + row

    def matrix(self, tasks: Sequence[str]) -> Tensor:
        """Return the rows of all tasks over all ranks, (tasks, elements); zeros for a task that took no part."""
        nothing = next(iter(self.rows.values())).new_zeros(()).expand_as(next(iter(self.rows.values())))
        rows = torch.stack([self.rows.get(task, nothing) for task in tasks])
        return self._world.sum(rows / self._precision.unscale(1.0))

    def _gradient(self, loss: Tensor) -> Tensor:
        scaled = self._precision.scale(loss)
        if not scaled.requires_grad:  # a task without any labels here may be a plain 0
            return torch.cat([torch.zeros_like(param).reshape(-1) for param in self.params])
        found = torch.autograd.grad(scaled, list(self.params), retain_graph=True, allow_unused=True)
        parts = []
        for place, (param, gradient) in enumerate(zip(self.params, found, strict=True)):
            self.reached[place] |= gradient is not None
            parts.append((torch.zeros_like(param) if gradient is None else gradient).reshape(-1))
        return torch.cat(parts)


class GradientLook:
    """Each task's gradient of all shared parameters, for callbacks that asked for this step."""

    def __init__(self, model: nn.Module, world: World, precision: Precision) -> None:
        self._rows = TaskRows(shares(model).shared_parameters(), world, precision)

    def add(self, terms: Terms, totals: Counts) -> None:
        """Look at one micro-batch, before its backward pass, which this does not change."""
        self._rows.add(terms, totals)

    @property
    def has_any(self) -> bool:
        """Whether a task had a gradient in this step."""
        return bool(self._rows.rows)

    def gradients(self, step: int) -> TaskGradients:
        """Return the products of the tasks' gradients with each other."""
        tasks = tuple(self._rows.rows)
        rows = self._rows.matrix(tasks).float()
        return TaskGradients(tasks, rows @ rows.T, step)


def shares(model: nn.Module) -> SharesParameters:
    """Return the model inside wrappers; raise TrainingError if it does not tell what its tasks share."""
    inner = unwrap(model)
    if isinstance(inner, SharesParameters):
        return inner
    raise TrainingError(
        f"{type(inner).__name__} does not tell which parameters its tasks share; use a MultiTaskModel, or define "
        f"shared_parameters(), last_shared_layer(batch) and layer_parameters(layer)"
    )
