"""What weightings of several tasks ask of a step: each task's gradient, or the losses before and after the update.

A `Balance` stands between the loss terms and the backward pass. Most weightings need none: their weights are in the
terms. Nothing here waits for the device.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Batch, ConfigError, Task, Terms
from etude.core.batch import JointBatch
from etude.core.buffers import BufferGuard
from etude.core.calling import unwrap
from etude.core.terms import LossTerm
from etude.distributed import World, is_empty
from etude.engine.precision import Precision
from etude.multitask.gradients import LOSS, Counts, SharesParameters, TaskRows, shares
from etude.multitask.replay import Replay
from etude.multitask.task import MultiTask
from etude.multitask.weighting import (
    CombinesGradients,
    WatchesEpochs,
    WatchesGradients,
    WatchesUpdates,
    assign_gradients,
)

logger = logging.getLogger("etude")

Descend = Callable[[Terms], None]
"""Runs the backward pass of Σ weight·sum/total."""

LEAST = 1e-9
"""Counts below this are none: the step puts a tiny number in place of 0."""


class Balance:
    """The part of a weighting in a step; this one does nothing, and so serves weightings that need nothing."""

    descends = True
    """Whether gradients come from one backward pass, in which ranks meet."""

    def __init__(self, weighting: Any, task: MultiTask, model: nn.Module, world: World) -> None:
        self.weighting: Any = weighting
        self.task, self.model, self.world = task, model, world
        self.names = tuple(task.tasks)
        self._dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self.notice: Callable[[str, Mapping[str, Any]], None] = lambda message, _facts: logger.info(message)
        """Receives what the user should know."""

    def prepare(self, micro_batches: Sequence[Batch], totals: Counts | None) -> None:
        """Begin a step; `totals` are known if there are several micro-batches."""

    def backward(self, terms: Terms, totals: Counts, descend: Descend) -> None:
        """Make the gradients of one micro-batch."""
        descend(terms)

    def finish(self, sums: Mapping[str, Tensor], totals: Counts, step: int) -> None:
        """Look at the whole step, or change its gradients, before the update."""

    def after_update(self, micro_batches: Sequence[Batch]) -> None:
        """Look at what the update did."""

    def end_epoch(self, means: Mapping[str, float]) -> None:
        """Take in the mean losses of an epoch; warn of a task that had no labels in all of it."""
        for task, weight in self.task.weights.items():
            if weight and f"{task}{LOSS}" not in means:
                logger.warning(
                    "the task '%s' had no labels in a whole epoch, so it learned nothing and the sum of the losses is "
                    "not reported; look at its labels and at its share of the data",
                    task,
                )
        weighting = self.weighting
        if isinstance(weighting, WatchesEpochs):
            losses = [means.get(f"{task}{LOSS}", float("nan")) for task in self.names]
            like = self.task.scale(self.weighting.device, self.weighting.dtype)
            vector = torch.tensor(losses, dtype=torch.float64).to(like)
            weighting.end_epoch(vector.nan_to_num(0.0), like * vector.isfinite())

    def losses(self, sums: Mapping[str, Tensor], totals: Counts) -> tuple[Tensor, Tensor]:
        """Return the mean losses of all tasks over all ranks, and their weights, 0 without labels in this step."""
        device = next(iter(sums.values())).device
        zero = torch.zeros((), device=device)
        found = torch.stack([sums.get(f"{task}{LOSS}", zero).detach() for task in self.names])
        found = found.to(self._dtype)
        counts = torch.stack([_on(totals.get(f"{task}{LOSS}", 0.0), device) for task in self.names])
        present = counts > LEAST
        means = torch.where(present, self.world.sum(found) / torch.where(present, counts, 1.0), 0.0)
        return means, self.task.scale(device, self._dtype) * present


class GradNormBalance(Balance):
    """Shows the weighting each task's gradient of one shared layer: the one it names, or the last one."""

    def __init__(self, weighting: Any, task: MultiTask, model: nn.Module, world: World, precision: Precision) -> None:
        super().__init__(weighting, task, model, world)
        self._layer: str | None = weighting.layer
        self._params = [] if self._layer is None else shares(model).layer_parameters(self._layer)
        self._began = self._reached = False
        self._precision = precision
        self._rows = TaskRows(self.names, self._params, world, precision)

    def prepare(self, micro_batches: Sequence[Batch], totals: Counts | None) -> None:
        """Begin with no gradients; the first step finds the layer and says which it is."""
        if not self._began:
            self._begin(micro_batches)
            self._rows = TaskRows(self.names, self._params, self.world, self._precision)
        self._rows.begin()

    def _begin(self, micro_batches: Sequence[Batch]) -> None:
        model = shares(self.model)
        if self._layer is None:
            self._layer = self._last_layer(model, micro_batches)
            self._params = model.layer_parameters(self._layer)
        self._began = True
        if self.world.is_main:
            number = sum(param.numel() for param in self._params)
            self.notice(
                f"{type(self.weighting).__name__} looks at the gradients of {self._layer} ({number:,} parameters)",
                {"event": "weighting", "layer": self._layer},
            )

    def _last_layer(self, model: SharesParameters, micro_batches: Sequence[Batch]) -> str:
        """Return the name of the last shared layer; ranks without samples take it from the others."""
        names: list[str] = [name for name, _ in unwrap(self.model).named_modules()]
        found = -1
        for batch in micro_batches:
            parts = [part for part in (batch if isinstance(batch, JointBatch) else (batch,)) if not is_empty(part)]
            if parts:
                with self._precision.autocast():
                    found = names.index(model.last_shared_layer(parts[0]))
                break
        return names[self.world.host_max([found])[0]]

    def backward(self, terms: Terms, totals: Counts, descend: Descend) -> None:
        """Look at each task's gradient first."""
        self._rows.add(terms, totals)
        descend(terms)

    def finish(self, sums: Mapping[str, Tensor], totals: Counts, step: int) -> None:
        """Let the weighting see the gradients of the whole step; the first one shows whether the layer has any."""
        if not self._reached:
            self._reached = bool(self.world.host_max([max(self._rows.reached)])[0])
            if not self._reached:
                raise ConfigError(
                    f"no task has a gradient of the layer '{self._layer}', which {type(self.weighting).__name__} is to "
                    f"look at; name one that the features are made with"
                )
        losses, scale = self.losses(sums, totals)
        self.weighting.observe(losses, self._rows.matrix(), scale)


class CombiningBalance(Balance):
    """Lets the weighting make the gradient of the shared parameters; the others take that of the weighted sum."""

    descends = False

    def __init__(
        self,
        weighting: Any,
        task: MultiTask,
        model: nn.Module,
        world: World,
        precision: Precision,
        params: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(weighting, task, model, world)
        shared = {id(param) for param in shares(model).shared_parameters()}
        self._shared = [param for param in params if id(param) in shared]
        self._own = [param for param in params if id(param) not in shared]
        self._size = sum(param.numel() for param in self._shared)
        self._precision = precision
        self._rows = TaskRows(self.names, [*self._shared, *self._own], world, precision)
        self._reached: dict[tuple[tuple[str, str | None], ...], list[int]] = {}

    def prepare(self, micro_batches: Sequence[Batch], totals: Counts | None) -> None:
        """Begin with no gradients."""
        self._rows.begin()

    def backward(self, terms: Terms, totals: Counts, descend: Descend) -> None:
        """Keep each task's gradient apart."""
        self._rows.add(terms, totals)

    def finish(self, sums: Mapping[str, Tensor], totals: Counts, step: int) -> None:
        """Make one gradient of them all."""
        _, scale = self.losses(sums, totals)
        rows = self._rows.matrix()
        shared, own = rows[:, : self._size], rows[:, self._size :]
        # As backward passes of several ranks leave them: scaled like the loss, and averaged over ranks.
        factor = self._precision.unscale(1.0) / self.world.size
        if self._own:
            assign_gradients((scale.to(own.dtype) @ own).mul_(factor), self._own)
        # Weighed in place: a copy of all gradients takes longer than the rest of the method.
        shared.masked_fill_(scale[:, None] <= 0, 0.0).mul_(scale[:, None])
        assign_gradients(self.weighting.combine(shared, step=step, scale=None).mul_(factor), self._shared)
        for param, reached in zip(self._rows.params, self._params_reached(), strict=True):
            if not reached:
                param.grad = None  # as a backward pass leaves it: the heads of tasks that rest are not to decay

    def _params_reached(self) -> list[int]:
        """Return 1 for every parameter that one of the tasks of this step uses on any rank."""
        if self.world.size == 1:
            return self._rows.reached
        key = tuple((task, self.task.head_of(task)) for task in self._rows.found)
        if key not in self._reached:  # once for the same tasks and heads: ranks talk about it through their hosts
            self._reached[key] = self.world.host_max(self._rows.reached)
        return self._reached[key]


class UpdateBalance(Balance):
    """Shows the weighting the losses of the step's batches before and after the update.

    Both are of the same dropout: what it changes in a loss is far more than what one update does.
    """

    def __init__(
        self, weighting: Any, task: MultiTask, model: nn.Module, world: World, precision: Precision, run: Task
    ) -> None:
        super().__init__(weighting, task, model, world)
        self._run, self._precision = run, precision
        self._buffers = BufferGuard(unwrap(model))
        self._random = Replay(next(model.parameters()).device)
        self._before: tuple[Tensor, Tensor] | None = None
        self._totals: Counts = {}

    def prepare(self, micro_batches: Sequence[Batch], totals: Counts | None) -> None:
        """With several micro-batches the losses of all must be known before the first backward pass."""
        self._before, self._totals = None, totals or {}
        self._random.remember()
        if totals is not None:
            with self._random.again():
                self._before = self._losses_now(micro_batches, totals)

    def backward(self, terms: Terms, totals: Counts, descend: Descend) -> None:
        """Weigh the losses by what they are."""
        self._totals = totals
        if self._before is None:
            self._before = self.losses({name: term.sum for name, term in terms.items()}, totals)
        weights = dict(zip(self.names, self.weighting.coefficients(*self._before).unbind(), strict=True))
        descend(
            {name: LossTerm(term.sum, term.count, weights[name.removesuffix(LOSS)]) for name, term in terms.items()}
        )

    def after_update(self, micro_batches: Sequence[Batch]) -> None:
        """Run the batches again, without gradients, and tell the weighting."""
        if self._before is None:  # all tasks of this step are only watched
            return
        before, scale = self._before
        with self._random.again():
            after, _ = self._losses_now(micro_batches, self._totals)
        self.weighting.after_update(before, after, scale)

    @torch.no_grad()
    def _losses_now(self, micro_batches: Sequence[Batch], totals: Counts) -> tuple[Tensor, Tensor]:
        sums: dict[str, Tensor] = {}
        self._buffers.remember()
        for batch in micro_batches:
            with self._precision.autocast():  # the losses before and after must differ by the update alone
                terms = self._run(self.model, batch, metrics=False)
            for name, term in terms.items():
                sums[name] = sums[name] + term.sum if name in sums else term.sum
        result = self.losses(sums, totals)
        self._buffers.put_back(torch.ones((), device=result[0].device))  # a look must not move running statistics
        return result


def make_balance(
    task: MultiTask, model: nn.Module, world: World, precision: Precision, params: Sequence[nn.Parameter], run: Task
) -> Balance:
    """Return what the task's weighting needs in a step; `run` is the task as this rank runs it."""
    weighting: Any = task.weighting
    if weighting is not None and weighting.has_state and all(weighting is not part for part in model.modules()):
        raise ConfigError(
            f"{type(weighting).__name__} is not part of the model, so that it would be neither trained nor saved; "
            f"give it to the model too: MultiTaskModel(trunk, heads, weighting)"
        )
    if isinstance(weighting, CombinesGradients):
        return CombiningBalance(weighting, task, model, world, precision, params)
    if isinstance(weighting, WatchesGradients):
        return GradNormBalance(weighting, task, model, world, precision)
    if isinstance(weighting, WatchesUpdates):
        return UpdateBalance(weighting, task, model, world, precision, run)
    return Balance(weighting, task, model, world)


def _on(count: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, torch.float32, non_blocking=True)
    return torch.full((), count, dtype=torch.float32, device=device)  # a copy would make the host wait
