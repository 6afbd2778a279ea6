"""From loss terms to gradients: which backward passes run, and what their gradients are divided by.

A task returns sums and counts. The gradients of the sums add up over micro-batches and ranks, and are divided once by
the count over all of them: k micro-batches of b samples are one batch of k·b samples, with any masks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etude.core import Batch, Task, Terms, TrainingError
from etude.core.spans import NOTHING
from etude.core.task import check_terms
from etude.distributed import World
from etude.distributed.parallel import (
    RankTask,
    begin_reduction,
    check_frozen,
    check_gradients,
    finish_reduction,
    idle_output,
    local_gradients,
    mean_count,
    run_backward,
)
from etude.engine.callback_list import CallbackList
from etude.engine.precision import MixedPrecision

Counts = dict[str, Tensor | float]

SMALLEST_COUNT = 1e-12
"""Replaces a count of 0: sum and gradient are 0 too, so the result is 0 instead of 0/0."""


@dataclass(frozen=True, slots=True)
class ObjectiveParts:
    """What an objective works with."""

    model: nn.Module
    """The model as it is called: it may be wrapped for data parallelism."""
    params: Sequence[nn.Parameter]
    """The parameters that the step updates."""
    device: torch.device
    world: World
    precision: MixedPrecision


class Objective:
    """Σ weight·sum/count over all micro-batches and ranks of a step. Nothing here waits for the device.

    With a single term the gradient is that of its sum, and the update divides it: no extra pass over the gradients.
    Several terms have different counts, so each is divided before its backward pass; with several micro-batches the
    task must then know the counts in advance.
    """

    is_capturable = True
    """False if the host decides something in a step by values it reads or draws: no CUDA graph can replay it."""
    can_defer = True
    """False if ranks communicate between the micro-batches of a step."""
    defers = False
    """Whether gradients are all-reduced after all backward passes: until then a rank may fail and begin again."""
    all_reduces = True
    """Whether the gradients of backward passes are all-reduced; False for one that combines gradients itself."""

    def __init__(self, task: Task, parts: ObjectiveParts) -> None:
        self.parts = parts
        self.task = self.on_rank(task)
        """The task as this rank runs it."""
        self.step = 0
        self.is_repeating = False
        """Whether this is the second pass over the micro-batches of a step, of which nothing is reported."""
        self.micro_batches: Sequence[Batch] = ()
        self._is_last = False
        self.sums: dict[str, Tensor] = {}
        """Per reported term, the sum over the micro-batches of the step so far (detached)."""
        self.counts: Counts = {}
        self.optional: set[str] = set()
        """Terms of any step so far whose average is undefined when their count is zero."""
        self.totals: Counts | None = None
        """Divisor of each term before its backward pass; None while the step has only one term."""
        self._single: tuple[str, Tensor | float] | None = None
        """Name and count of the only term."""
        self._counts_of = task.counts
        self._is_checked = False  # the return value of a task is checked once

    # --- the sequence of calls in a step

    def begin(self, micro_batches: Sequence[Batch], step: int) -> None:
        """Reset for a new step."""
        self.micro_batches, self.step = micro_batches, step
        self.sums, self.counts = {}, {}
        self.totals = self._single = None
        if self.parts.world.size > 1:
            check_frozen(self.parts.model)
            begin_reduction(self.parts.model)
        # While a rank runs out of memory, the others must not wait for its counts.
        if self.defers and len(self._counts_of(micro_batches[0]) or ()) > 1:
            self.totals = self.totals_ahead()

    def micro_batch(self, place: int) -> AbstractContextManager[object]:
        """Return the context of a micro-batch: the last one of a step all-reduces the gradients."""
        self._is_last = place + 1 == len(self.micro_batches) and self.all_reduces and not self.defers
        if self.parts.world.size == 1 or self._is_last:
            return NOTHING
        return local_gradients(self.parts.model)

    def backward(self, terms: Terms) -> None:
        """Add the terms of a micro-batch and run its backward pass."""
        weighted = self.add(terms)
        if not weighted:
            self.all_reduce_nothing()
            return
        if self.totals is None:
            if self._are_single(weighted):
                self._count_single(weighted)
            else:
                self._divide_from_now_on(weighted)
        self.run_backward(weighted)

    def all_reduce(self) -> None:
        """All-reduce the gradients of the step, unless its last backward pass has done so."""
        if self.parts.world.size > 1 and self.all_reduces:
            finish_reduction(self.parts.model, self._count)

    def finish(self) -> Tensor | float:
        """Complete the gradients; return the divisor for the update."""
        if self.totals is not None:
            return self.undo_average(1.0)
        if self._single is None:
            raise self.nothing_to_learn()
        name, count = self._single
        if self.parts.world.size == 1:
            return _nonzero(count)
        if (mean := mean_count(self.parts.model)) is not None:  # averaged over ranks like the gradients
            check_gradients(self.parts.model)
            return _nonzero(mean)
        return self.undo_average(self.over_ranks({name: count})[name])

    def after_update(self) -> None:
        """Called after the update."""

    # --- around steps

    def is_usual(self, step: int) -> bool:  # noqa: ARG002
        """Return whether a step is like the others; if not, it is not replayed from a graph."""
        return True

    def only_once(self) -> str:
        """Return what cannot run the micro-batches of a step twice before the update; empty if there is nothing."""
        return ""

    def connect(self, callbacks: CallbackList) -> None:
        """Called before training with the callbacks of the run: some read values that only an objective has."""

    def end_run(self) -> None:
        """Called after the last step of a run, also if it failed."""

    def end_epoch(self, means: Mapping[str, float]) -> None:
        """Called with the averages of every epoch."""

    # --- one term, or several

    def _are_single(self, weighted: Terms) -> bool:
        """Whether all micro-batches up to this one have the same single term."""
        return len(weighted) == 1 and (self._single is None or self._single[0] in weighted)

    def _count_single(self, weighted: Terms) -> None:
        ((name, term),) = weighted.items()
        self._single = name, term.count if self._single is None else self._single[1] + term.count

    @property
    def _count(self) -> Tensor | float:
        """The count of this rank so far, by which the update will divide; 0 if each term is divided by its own."""
        return self._single[1] if self._single is not None and self.totals is None else 0.0

    def _divide_from_now_on(self, weighted: Terms) -> None:
        """From now on divide every term before its backward pass; divide the gradients so far by the same total."""
        if self.defers:
            raise TrainingError(
                f"the loss has several terms ({', '.join(weighted)}), whose counts the processes exchange during "
                "a step: it cannot be done again if one of them runs out of memory; define `counts(batch)`, which "
                "tells all counts beforehand, or set training.on_out_of_memory to error"
            )
        self.totals = self.totals_of(weighted)
        if self._single is not None:
            if self.parts.world.in_lockstep:
                raise TrainingError(
                    f"the terms of the loss changed from {self._single[0]} to {', '.join(weighted)} between the "
                    "micro-batches of a step, which a model that processes divide does not support; let all have the "
                    "same terms"
                )
            gradients = [param.grad for param in self.parts.params if param.grad is not None]
            torch._foreach_div_(gradients, self._total_of(self._single[0]))

    def _total_of(self, name: str) -> Tensor | float:
        assert self.totals is not None
        if name not in self.totals:
            raise TrainingError(f"`counts(batch)` of the task has no '{name}'; it must return every weighted term")
        return self.totals[name]

    # --- helpers, also of subclasses

    def on_rank(self, task: Task) -> Task:
        """Return a task as this rank runs it: one of several ranks may have no samples."""
        return task if self.parts.world.size == 1 else RankTask(task, self.parts.world)

    def add(self, terms: Terms) -> Terms:
        """Add the terms of a micro-batch; return those that are trained."""
        if not self._is_checked:
            check_terms(terms)
            self._is_checked = True
        sums, counts = self.sums, self.counts
        for name, term in terms.items():
            if term.reported:
                value = term.sum.detach() if term.sum.requires_grad else term.sum
                sums[name] = sums[name] + value if name in sums else value
                counts[name] = counts[name] + term.count if name in counts else term.count
                if term.optional:
                    self.optional.add(name)
        return {name: term for name, term in terms.items() if term.is_weighted}

    def all_reduce_nothing(self) -> None:
        """Run the all-reduce of a step whose last micro-batch has no trained terms on this or any rank."""
        if self._is_last and self.parts.world.size > 1:
            run_backward(self.parts.model, idle_output(self.parts.model), self._count)

    def run_backward(self, weighted: Terms) -> None:
        """Run the backward pass of Σ weight·sum/total, or of weight·sum if the update divides."""
        parts = []
        for name, term in weighted.items():
            part = term.sum if isinstance(term.weight, float) and term.weight == 1.0 else term.sum * term.weight
            parts.append(part if self.totals is None else part / self._total_of(name))
        loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        if not loss.requires_grad:
            raise TrainingError(
                "the loss does not depend on any parameter that is trained: look for .detach(), .item(), argmax, "
                "torch.no_grad() or frozen layers between the parameters and the loss"
            )
        loss = self.parts.precision.scale(loss)
        if self.parts.world.size == 1:
            loss.backward()
        else:
            run_backward(self.parts.model, loss, self._count)

    def totals_of(self, weighted: Terms) -> Counts:
        """Return the counts of all terms over the whole step, once its terms are known."""
        if len(self.micro_batches) == 1:
            return self.over_ranks({name: term.count for name, term in weighted.items()})
        return self.totals_ahead(weighted)

    def totals_ahead(self, names: Sequence[str] | Terms = ()) -> Counts:
        """Return the counts of all terms over the whole step from its batches; `names` are for the error message."""
        totals: Counts = {}
        for batch in self.micro_batches:
            ahead = self._counts_of(batch)
            if ahead is None:
                before = () if self._single is None else self._single[:1]
                several = ", ".join(dict.fromkeys([*before, *names]))
                raise TrainingError(
                    f"the loss has several terms ({several}): with gradient accumulation its task must "
                    f"define `counts(batch)`; or set grad_accum_steps to 1"
                )
            for name, count in ahead.items():
                totals[name] = totals.get(name, 0.0) + count
        return self.over_ranks(totals) if totals else totals

    def over_ranks(self, counts: Counts) -> Counts:
        """Return counts over all ranks, with zeros replaced."""
        if self.parts.world.size > 1:
            names = sorted(counts)  # in the same order on every rank
            row = torch.stack([_on_device(counts[name], self.parts.device) for name in names])
            counts = dict(zip(names, self.parts.world.sum(row).unbind(), strict=True))
        return {name: _nonzero(count) for name, count in counts.items()}

    def undo_average(self, divisor: Tensor | float) -> Tensor | float:
        """Check that the gradients are complete; data parallelism averages over ranks, but a sum is needed."""
        if self.parts.world.size == 1:
            return divisor
        check_gradients(self.parts.model)
        return divisor / self.parts.world.size

    def nothing_to_learn(self) -> TrainingError:
        """Return the error for a step without any trained term."""
        batch = self.micro_batches[0]
        held = f" for batches that hold {', '.join(map(str, batch))}" if isinstance(batch, Mapping) and batch else ""
        return TrainingError(f"the loss has no term with a weight other than 0{held}: there is nothing to learn from")


def _on_device(count: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, torch.float64)
    return torch.full((), count, dtype=torch.float64, device=device)  # a copy would synchronise


def _nonzero(count: Tensor | float) -> Tensor | float:
    if isinstance(count, Tensor):
        return count.clamp_min(SMALLEST_COUNT)
    return float(max(count, SMALLEST_COUNT))
