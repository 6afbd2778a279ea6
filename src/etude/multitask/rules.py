"""Weightings that need more than weights: per-task gradients, or the losses before and after the update."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from etude.core import Batch, ConfigError, Terms
from etude.core.batch import JointBatch, is_empty
from etude.core.buffers import BufferGuard
from etude.core.model import unwrap
from etude.core.random import Replay
from etude.core.task import LossTerm
from etude.engine.objective import Counts, ObjectiveParts
from etude.multitask.gradients import LOSS, shared_model
from etude.multitask.objective import TaskObjective
from etude.multitask.weighting import Needs, assign_gradients

if TYPE_CHECKING:
    from etude.multitask.task import MultiTask


def make_objective(task: "MultiTask", parts: ObjectiveParts) -> TaskObjective:
    """Return the objective that the weighting of the tasks needs."""
    objectives: dict[Needs, type[TaskObjective]] = {
        "nothing": TaskObjective,
        "losses": LossObjective,
        "updates": UpdateObjective,
        "layer_gradients": GradNormObjective,
        "gradients": CombinedGradients,
    }
    needs: Needs = "nothing" if task.weighting is None else task.weighting.needs
    if parts.world.in_lockstep and needs not in ("nothing", "losses"):
        raise ConfigError(
            f"the weighting {type(task.weighting).__name__} needs {needs.replace('_', ' ')} of each task, which "
            "processes that divide the model do not have; use another weighting, such as 'static' or 'uncertainty', "
            "or parallel: ddp"
        )
    return objectives[needs](task, parts)


class GradNormObjective(TaskObjective):
    """Passes the weighting each task's gradient of one shared layer: the one it names, or the last one."""

    is_capturable = can_defer = False

    def __init__(self, task: "MultiTask", parts: ObjectiveParts) -> None:
        super().__init__(task, parts)
        if self.weighting.layer is not None:
            shared_model(parts.model).layer_parameters(self.weighting.layer)  # check that the layer exists
        self._is_reached = False

    def begin(self, micro_batches: Sequence[Batch], step: int) -> None:
        """Begin without gradients; the first step finds the layer and reports it."""
        if not self.rows:
            layer = self.weighting.layer or self._last_layer(micro_batches)
            params = shared_model(self.parts.model).layer_parameters(layer)
            self.rows = [self.make_rows(params)]
            if self.parts.world.is_main:
                words = f"uses the gradients of {layer} ({sum(param.numel() for param in params):,} parameters)"
                self.notice(f"{type(self.weighting).__name__} {words}", {"event": "weighting", "layer": layer})
        super().begin(micro_batches, step)

    def complete(self, totals: Counts) -> None:
        """Pass the gradients of the whole step to the weighting; the first step checks that the layer has any."""
        if not self._is_reached:
            self._is_reached = bool(self.parts.world.host_max([max(self.rows[0].reached)])[0])
            if not self._is_reached:
                raise ConfigError(
                    f"no task has a gradient of the layer '{self.weighting.layer}', which "
                    f"{type(self.weighting).__name__} needs; choose a layer that the features depend on"
                )
        losses, scale = self.losses(self.sums, totals)
        self.weighting.observe(losses, self.rows[0].matrix(), scale)

    def _last_layer(self, micro_batches: Sequence[Batch]) -> str:
        """Return the name of the last shared layer; ranks without samples get it from the others."""
        model = shared_model(self.parts.model)
        names = [name for name, _ in model.named_modules()]
        batches = [part for batch in micro_batches for part in (batch if isinstance(batch, JointBatch) else (batch,))]
        found = -1
        if some := [batch for batch in batches if not is_empty(batch)]:
            with self.parts.precision.autocast():
                found = names.index(model.last_shared_layer(some[0]))
        last: str = names[self.parts.world.host_max([found])[0]]
        return last


class CombinedGradients(TaskObjective):
    """Lets the weighting compute the gradient of the shared parameters; others get that of the weighted sum."""

    is_capturable = can_defer = all_reduces = False

    def __init__(self, task: "MultiTask", parts: ObjectiveParts) -> None:
        super().__init__(task, parts)
        shared = {id(param) for param in shared_model(parts.model).shared_parameters()}
        self._shared = [param for param in parts.params if id(param) in shared]
        self._own = [param for param in parts.params if id(param) not in shared]
        self._size = sum(param.numel() for param in self._shared)
        self.rows = [self.make_rows([*self._shared, *self._own])]
        self._reached: dict[tuple[tuple[str, str | None], ...], list[int]] = {}

    def task_backward(self, weighted: Terms, totals: Counts) -> None:
        """Skip the backward pass of the sum: each task's gradient is computed separately."""

    def complete(self, totals: Counts) -> None:
        """Combine them into one gradient."""
        _, scale = self.losses(self.sums, totals)
        rows = self.rows[0].matrix()
        shared, own = rows[:, : self._size], rows[:, self._size :]
        # As a DDP backward pass leaves them: scaled like the loss, and averaged over ranks.
        factor = self.parts.precision.unscale(1.0) / self.parts.world.size
        if self._own:
            assign_gradients((scale.to(own.dtype) @ own).mul_(factor), self._own)
        # Scaled in place: copying all gradients takes longer than the rest of the method.
        shared.masked_fill_(scale[:, None] <= 0, 0.0).mul_(scale[:, None])
        merged = self.weighting.merge(shared, self.step, scale > 0)
        assign_gradients(merged.mul_(factor), self._shared)
        for param, reached in zip(self.rows[0].params, self._params_reached(), strict=True):
            if not reached:
                param.grad = None  # as after a backward pass: no weight decay for heads of inactive tasks

    def _params_reached(self) -> list[int]:
        """Return 1 for every parameter that a task of this step uses on any rank."""
        rows = self.rows[0]
        if self.parts.world.size == 1:
            return rows.reached
        key = tuple((task, self.tasks.head_of(task)) for task in rows.found)
        if key not in self._reached:  # cached per tasks and heads: ranks exchange it through their hosts
            self._reached[key] = self.parts.world.host_max(rows.reached)
        return self._reached[key]


class LossObjective(TaskObjective):
    """Weights the losses by their values in the step."""

    is_capturable = can_defer = False

    def __init__(self, task: "MultiTask", parts: ObjectiveParts) -> None:
        super().__init__(task, parts)
        self._buffers = BufferGuard(unwrap(parts.model))
        self._random = Replay(next(parts.model.parameters()).device)
        self._before: tuple[Tensor, Tensor] | None = None

    def begin(self, micro_batches: Sequence[Batch], step: int) -> None:
        """With several micro-batches all losses must be known before the first backward pass."""
        super().begin(micro_batches, step)
        self._before = None
        self._random.remember()
        if self.totals is not None:
            with self._random.again():
                self._before = self._losses_now(self.totals)

    def task_backward(self, weighted: Terms, totals: Counts) -> None:
        """Weight the losses of a micro-batch by those of the whole step."""
        if self._before is None:
            self._before = self.losses({name: term.sum for name, term in weighted.items()}, totals)
        weights = dict(zip(self.names, self.weighting.coefficients(*self._before).unbind(), strict=True))
        self.run_backward(
            {
                name: LossTerm(term.sum, term.count, weights[name.removesuffix(LOSS)])
                for name, term in weighted.items()
            }
        )

    @torch.no_grad()
    def _losses_now(self, totals: Counts) -> tuple[Tensor, Tensor]:
        sums: dict[str, Tensor] = {}
        self._buffers.remember()
        for batch in self.micro_batches:
            with self.parts.precision.autocast():  # the losses before and after must differ only by the update
                terms = self.task(self.parts.model, batch, metrics=False)
            for name, term in terms.items():
                sums[name] = sums[name] + term.sum if name in sums else term.sum
        result = self.losses(sums, totals)
        # a trial forward pass must not change running statistics
        self._buffers.put_back(torch.ones((), device=result[0].device))
        return result


class UpdateObjective(LossObjective):
    """Passes the weighting the losses of the step's batches before and after the update.

    Both use the same dropout masks, which change a loss far more than one update does.
    """

    def after_update(self) -> None:
        """Run the batches again without gradients, and pass the losses to the weighting."""
        if self._before is None or self.totals is None:  # all tasks of this step have weight 0
            return
        before, scale = self._before
        with self._random.again():
            after, _ = self._losses_now(self.totals)
        self.weighting.after_update(before, after, scale)
