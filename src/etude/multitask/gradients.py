"""Each task's own gradient with respect to the shared parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from etude.core import ConfigError, Terms, TrainingError
from etude.core.model import unwrap
from etude.distributed import World
from etude.engine.callback import Callback, RunParts
from etude.engine.precision import MixedPrecision
from etude.multitask.model import MultiTaskModel

Counts = Mapping[str, Tensor | float]
LOSS = "/loss"
"""Suffix of the terms of the tasks' losses: `<task>/loss`."""


@dataclass(slots=True)
class TaskGradients:
    """Inner products of the tasks' gradients with respect to the shared parameters, in one step."""

    tasks: tuple[str, ...]
    """The tasks active in this step, in order."""
    products: Tensor
    """(tasks, tasks), float32 on the device: inner products of the gradients of the unweighted mean losses, over all
    micro-batches and ranks, unscaled."""
    step: int


class TaskGradientWatcher(Callback):
    """A callback that reads the gradients of the tasks in some of the steps."""

    def bind(self, parts: RunParts) -> None:
        """Raise ConfigError if there is only one task."""
        from etude.multitask.task import MultiTask  # imported here, because it imports this module

        if not isinstance(parts.task, MultiTask):
            raise ConfigError(
                f"{type(self).__name__} compares several tasks, but {type(parts.task).__name__} is a single task; "
                "pass task=MultiTask({...}), or remove the callback"
            )

    def acts_in_steps(self) -> bool:
        """True: it reads the gradients of steps."""
        return True

    def wants_task_gradients(self, step: int) -> bool:
        """Return whether it needs those of this step; called before every step. By default all steps."""
        return True

    def on_task_gradients(self, gradients: TaskGradients) -> None:
        """Called in the requested steps; reading the products synchronises with the device."""


def keep_buffers() -> None:
    """Let compiled models keep what a backward pass needs: there is one for each task."""
    from torch._functorch import config

    config.donated_buffer = False


class TaskRows:
    """The gradients of the tasks' mean losses, accumulated over the micro-batches of a step: one row per task.

    The rows belong to one matrix that is reused in every step: memory of this size would otherwise be newly mapped in
    every step, and the page faults would take longer than the arithmetic.
    """

    def __init__(
        self, tasks: Sequence[str], params: Sequence[nn.Parameter], world: World, precision: MixedPrecision
    ) -> None:
        keep_buffers()
        self.tasks, self.params = tuple(tasks), params
        self._world, self._precision = world, precision
        sizes = [param.numel() for param in params]
        dtype = reduce(torch.promote_types, (param.dtype for param in params))
        self._matrix = torch.zeros(len(self.tasks), sum(sizes), dtype=dtype, device=params[0].device)
        self._parts: dict[str, list[Tensor]] = {}
        """Views of every task's row with the shapes of the parameters."""
        for task, row in zip(self.tasks, self._matrix, strict=True):
            self._parts[task] = [part.view_as(param) for part, param in zip(row.split(sizes), params, strict=True)]
        self.begin()

    def begin(self) -> None:
        """Begin a step, without gradients."""
        self.found: dict[str, None] = {}
        """The tasks that had terms in this step, in order of occurrence."""
        self.reached = [0] * len(self.params)
        """1 for every parameter that a task uses on this rank."""

    def add(self, terms: Terms, totals: Counts) -> None:
        """Add the gradients of these terms, one backward pass per task; the graph is kept."""
        for name, term in terms.items():
            if name.endswith(LOSS):
                self._add(name.removesuffix(LOSS), term.sum / totals[name])

    def matrix(self) -> Tensor:
        """Return the rows of all tasks over all ranks, (tasks, elements); zeros for an inactive task.

        The next step overwrites them.
        """
        rows = self._matrix
        for place, task in enumerate(self.tasks):
            if task not in self.found:
                rows[place].zero_()
        if self._precision.scaler is not None:
            rows.div_(self._precision.unscale(1.0))
        return self._world.sum(rows)

    def products(self, step: int) -> TaskGradients:
        """Return the inner products of the tasks' gradients."""
        tasks = tuple(self.found)
        rows = self.matrix().float()
        products = rows @ rows.T
        if tasks != self.tasks:  # without an index list, whose copy to the device would synchronise
            places = [self.tasks.index(task) for task in tasks]
            products = torch.stack([torch.stack([products[one, other] for other in places]) for one in places])
        return TaskGradients(tasks, products, step)

    def _add(self, task: str, loss: Tensor) -> None:
        """Add one gradient to the task's row, or start the row with it."""
        places, gradients = self._gradients(loss)
        parts = self._parts[task]
        if task in self.found:
            if places:
                torch._foreach_add_([parts[place] for place in places], gradients)
            return
        self.found[task] = None
        if len(places) < len(parts):
            unused = set(range(len(parts))).difference(places)
            torch._foreach_zero_([parts[place] for place in unused])
        if places:
            torch._foreach_copy_([parts[place] for place in places], gradients)

    def _gradients(self, loss: Tensor) -> tuple[list[int], list[Tensor]]:
        """Return the indices of the parameters that the loss depends on, and their gradients."""
        scaled = self._precision.scale(loss)
        if not scaled.requires_grad:  # the loss of a task without labels may be a constant 0
            return [], []
        found = torch.autograd.grad(scaled, list(self.params), retain_graph=True, allow_unused=True)
        places = [place for place, gradient in enumerate(found) if gradient is not None]
        for place in places:
            self.reached[place] = 1
        return places, [found[place] for place in places]


def shared_model(model: nn.Module) -> MultiTaskModel:
    """Return the model inside wrappers; raise TrainingError if it does not define shared parameters."""
    inner = unwrap(model)
    if isinstance(inner, MultiTaskModel):
        return inner
    raise TrainingError(
        f"{type(inner).__name__} does not define which parameters its tasks share; use a MultiTaskModel"
    )
