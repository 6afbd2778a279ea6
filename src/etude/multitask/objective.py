"""Gradients of several tasks: tasks without labels, ranks without samples, callbacks that read task gradients.

`TaskObjective` is for weightings whose weights are in the terms. Those that need more are in `rules.py`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from etude.core import Batch, ConfigError, Task, Terms, TrainingError
from etude.core.batch import STREAM, JointBatch, is_empty
from etude.core.model import unwrap
from etude.core.task import LossTerm
from etude.distributed import World
from etude.distributed.lockstep import Spare
from etude.distributed.parallel import idle_output, nothing_of_terms
from etude.engine.callback_list import CallbackList
from etude.engine.objective import Counts, Objective, ObjectiveParts
from etude.multitask.gradients import LOSS, TaskGradientWatcher, TaskRows, keep_buffers, shared_model
from etude.multitask.heads import LanguageModelHead
from etude.multitask.model import MultiTaskModel

if TYPE_CHECKING:
    from etude.multitask.task import MultiTask

logger = logging.getLogger("etude")

LEAST = 1e-9
"""Counts below this mean zero: the step replaces 0 by a tiny number."""


class TaskObjective(Objective):
    """Σ over tasks of weight·sum/count, where not every micro-batch has every task."""

    def __init__(self, task: "MultiTask", parts: ObjectiveParts) -> None:
        super().__init__(task, parts)
        self.tasks = task
        self.names = tuple(task.tasks)
        self.weighting: Any = task.weighting
        self._dtype = torch.promote_types(next(parts.model.parameters()).dtype, torch.float32)
        self.notice: Callable[[str, Mapping[str, Any]], None] = lambda message, _facts: logger.info(message)
        """Receives messages for the user."""
        self.rows: list[TaskRows] = []
        """Per-task gradients that the weighting needs in every step."""
        self._watchers: Sequence[TaskGradientWatcher] = ()
        self._probe: TaskRows | None = None
        """Per-task gradients of all shared parameters, for callbacks that need them in some steps."""
        self._kept: list[TaskRows] = []
        """Those of both that this step needs."""
        self._trained: set[str] = set()
        """Tasks that this step trains."""
        self._idle: dict[frozenset[str | None], list[nn.Parameter]] = {}
        """By the heads that a step trains, the parameters of all others."""
        rule = self.weighting
        if rule is not None and rule.state_dict() and all(rule is not part for part in parts.model.modules()):
            raise ConfigError(
                f"{type(rule).__name__} is not part of the model, so it would be neither trained nor saved; call "
                "task.join(model) before training"
            )

    def on_rank(self, task: Task) -> Task:
        """Return the tasks as this rank runs them."""
        return task if self.parts.world.size == 1 else RankTasks(task, self.parts.world)  # type: ignore[arg-type]

    def connect(self, callbacks: CallbackList) -> None:
        """Find the callbacks that read the tasks' gradients, and send notices to the user."""
        self._watchers = [one for one in callbacks if isinstance(one, TaskGradientWatcher)]
        if self._watchers and self.parts.world.in_lockstep:
            raise ConfigError(
                f"{type(self._watchers[0]).__name__} reads the gradients of each task, which processes that divide the "
                "model do not have; remove it, or use parallel: ddp"
            )
        if self._watchers:
            keep_buffers()  # before the first step, in which the model is compiled
        self.notice = callbacks.on_notice

    def is_usual(self, step: int) -> bool:
        """Return whether no callback reads the tasks' gradients in this step."""
        return not any(one.wants_task_gradients(step) for one in self._watchers)

    def only_once(self) -> str:
        """Return the weighting if it uses more than the terms of a step: it would count both passes."""
        is_plain = self.weighting is None or self.weighting.needs == "nothing"
        return "" if is_plain else f"the weighting {type(self.weighting).__name__} (it needs {self.weighting.needs})"

    # --- a step

    def begin(self, micro_batches: Sequence[Batch], step: int) -> None:
        """Begin a step: with several micro-batches the counts of all tasks are needed in advance."""
        super().begin(micro_batches, step)
        self._trained = set()
        self._kept = list(self.rows)
        if not (self.is_repeating or self.is_usual(step)):
            self._probe = self._probe or self.make_rows(shared_model(self.parts.model).shared_parameters())
            self._kept.append(self._probe)
        for rows in self._kept:
            rows.begin()
        if self.totals is None and (len(micro_batches) > 1 or self.defers):
            self.totals = self.totals_ahead() or self._no_totals()

    def make_rows(self, params: Sequence[nn.Parameter]) -> TaskRows:
        """Return an accumulator of per-task gradients of these parameters."""
        return TaskRows(self.names, params, self.parts.world, self.parts.precision)

    def backward(self, terms: Terms) -> None:
        """Compute the gradients of one micro-batch, which may have no task at all."""
        weighted = self.add(terms)
        if self.totals is None:
            self.totals = self.totals_of(weighted) if weighted else self._no_totals()
        if weighted:
            self._trained.update(name.rpartition("/")[0] for name in weighted)
            for rows in self._kept:
                rows.add(weighted, self.totals)
            self.task_backward(weighted, self.totals)
        else:
            self.all_reduce_nothing()

    def task_backward(self, weighted: Terms, totals: Counts) -> None:
        """Run the backward pass of the terms of a micro-batch."""
        self.run_backward(weighted)

    def finish(self) -> Tensor | float:
        """Complete the gradients; each term was divided before its backward pass."""
        assert self.totals is not None
        self.complete(self.totals)
        # Zeros that only keep ranks in sync, or that compiled code gives: weight decay must not be applied.
        for param in self._idle_params() if self._trained else self.parts.params:
            param.grad = None
        if self._probe is not None and self._probe in self._kept and self._probe.found:
            found = self._probe.products(self.step)  # before the update, which may change the loss scale
            for watcher in self._watchers:
                if watcher.wants_task_gradients(self.step):
                    watcher.on_task_gradients(found)
        return self.undo_average(1.0)

    def _idle_params(self) -> Sequence[nn.Parameter]:
        """Return the parameters of heads that no task of this step trains, with an output layer of the trunk."""
        model, heads = unwrap(self.parts.model), frozenset(map(self.tasks.head_of, self._trained))
        if not isinstance(model, MultiTaskModel):
            return ()
        if heads not in self._idle:
            others = [one for name, one in model.heads.items() if name not in heads]
            if any(isinstance(one, LanguageModelHead) and one.layer is None for one in others):
                others += filter(None, [model.get_output_embeddings()])
            kept = {id(param) for param in model.shared_parameters()}
            kept |= {id(param) for name in model.heads if name in heads for param in model.heads[name].parameters()}
            self._idle[heads] = [one for head in others for one in head.parameters() if id(one) not in kept]
        return self._idle[heads]

    def complete(self, totals: Counts) -> None:
        """Read or change the gradients of the whole step."""

    def end_epoch(self, means: Mapping[str, float]) -> None:
        """Pass the mean losses of an epoch to the weighting; warn about an active task without labels."""
        for task, weight in self.tasks.weights.items():
            if weight and f"{task}{LOSS}" not in means:
                logger.warning(
                    "the task '%s' had no labels in a whole epoch, so it learned nothing and the total loss is not "
                    "reported; check its labels and its share of the data",
                    task,
                )
        if self.weighting is not None:
            losses = [means.get(f"{task}{LOSS}", float("nan")) for task in self.names]
            like = self.tasks.scale(self.weighting.device, self.weighting.dtype)
            vector = torch.tensor(losses, dtype=torch.float64).to(like)
            self.weighting.end_epoch(vector.nan_to_num(0.0), like * vector.isfinite())

    def losses(self, sums: Mapping[str, Tensor], totals: Counts) -> tuple[Tensor, Tensor]:
        """Return the mean losses of all tasks over all ranks, and their weights, 0 without labels in this step."""
        device = next(iter(sums.values())).device
        zero = torch.zeros((), device=device)
        found = torch.stack([sums.get(f"{task}{LOSS}", zero).detach() for task in self.names])
        found = found.to(self._dtype)
        counts = torch.stack([_on(totals.get(f"{task}{LOSS}", 0.0), device) for task in self.names])
        present = counts > LEAST
        means = torch.where(present, self.parts.world.sum(found) / torch.where(present, counts, 1.0), 0.0)
        return means, self.tasks.scale(device, self._dtype) * present

    def nothing_to_learn(self) -> TrainingError:
        """Return the error for a step without any active task."""
        streams = {str(one[STREAM]) for one in self.micro_batches if isinstance(one, Mapping) and STREAM in one}
        if not streams:
            return super().nothing_to_learn()
        return TrainingError(
            f"no active task learns from the stream {' or '.join(sorted(streams))}, so the step has no loss; "
            "activate one or remove the stream"
        )

    def _no_totals(self) -> Counts:
        """Return no counts: tasks of weight 0, for example at the start of a ramp, are only evaluated."""
        if any(self.tasks.is_for(batch) for batch in self.micro_batches):
            return {}
        raise self.nothing_to_learn()


class RankTasks(Task):
    """Runs several tasks on this rank's share of a batch, even if it is empty."""

    def __init__(self, task: "MultiTask", world: World) -> None:
        self.task, self.world = task, world
        self._spares: dict[tuple[str, ...], Spare] = {}
        """By the terms that a batch has, so that all ranks use the same heads."""

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Return the terms of this rank's samples, and terms that only other ranks have, with count 0."""
        if self.world.in_lockstep:
            return self._in_lockstep(model, batch, metrics=metrics)
        names = self.task.weighted_terms(batch)
        if is_empty(batch):
            zero = idle_output(model)
            return {name: _absent(name, zero) for name in names}
        if not isinstance(batch, JointBatch) or not any(is_empty(part) for part in batch):
            return self.task(model, batch, metrics=metrics)
        # This rank has samples of only some streams; few models accept an empty batch.
        there = JointBatch([part for part in batch if not is_empty(part)])
        terms = self.task(model, there, metrics=metrics)
        nothing = torch.zeros((), device=next(model.parameters()).device)
        found = {name: terms.get(name) or _absent(name, nothing) for name in names}
        return found | {name: term for name, term in terms.items() if name not in found}

    def _in_lockstep(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the streams of a batch one after the other, those without samples here on a batch of another rank."""
        total: Terms = {}
        for part in batch if isinstance(batch, JointBatch) else [batch]:
            names = tuple(self.task.weighted_terms(part))
            spare = self._spares.setdefault(names, Spare(self.world))
            used = spare.instead_of(part)
            if used is part:
                terms = self.task(model, used, metrics=metrics)
                spare.judge(terms)
            else:
                zero = nothing_of_terms(self.task.lend(model, used))
                terms = {name: _absent(name, zero) for name in names}
            for name, term in terms.items():
                before = total.get(name)
                total[name] = term if before is None else _sum_of(before, term)
        return total


def _sum_of(one: LossTerm, other: LossTerm) -> LossTerm:
    return replace(one, sum=one.sum + other.sum, count=one.count + other.count)


def _absent(name: str, zero: Tensor) -> LossTerm:
    return LossTerm(zero, 0.0, reported=name.endswith(LOSS), optional=True)


def _on(count: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, torch.float32, non_blocking=True)
    return torch.full((), count, dtype=torch.float32, device=device)  # a copy would synchronise
