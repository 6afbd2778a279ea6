"""One training step: forward and backward over the micro-batches, one division, one update.

A task returns sums and counts. The gradients of the sums add up over micro-batches and ranks, and are divided once
by the count over all of them: k micro-batches of b samples are one batch of k·b samples, with any masks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from etude.core import Batch, Clock, LossTerm, StepReport, Task, Terms, TrainingError, num_samples
from etude.core.batch import STREAM, JointBatch
from etude.core.buffers import BufferGuard
from etude.core.terms import CountsAhead, SeveralTasks, check_terms
from etude.core.tokens import count_tokens, token_ids
from etude.distributed import RankTask, World, check_gradients, idle_output, local_gradients
from etude.engine.callback import Gradients, TaskGradients
from etude.engine.flops import ForwardFlops
from etude.engine.misfit import explained
from etude.engine.precision import Precision
from etude.engine.update import Updater
from etude.multitask.balance import Balance, make_balance
from etude.multitask.gradients import GradientLook
from etude.multitask.task import PENALTY, MultiTask

Counts = dict[str, Tensor | float]

SMALLEST_COUNT = 1e-12
"""Stands in for a count of 0, where sum and gradient are 0 too, so that 0 is the result and not 0/0."""


class Step:
    """Runs one optimizer step on a list of micro-batches; waits for nothing and reads nothing from the device."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        updater: Updater,
        precision: Precision,
        *,
        world: World | None = None,
        metrics: bool = False,
        flops: ForwardFlops | None = None,
    ) -> None:
        """Bind the parts. With `metrics`, terms of weight 0 (accuracy …) are computed in training too.

        `flops` makes the report say how much arithmetic the forward pass was.
        """
        self.model = model
        self.updater = updater
        self.precision = precision
        self.world = world if world is not None else World()
        self.tasks = task
        """The task as it was given."""
        self.task = task if self.world.size == 1 else RankTask(task, self.world)
        """The task as this rank runs it."""
        self.metrics = metrics
        self.clock = Clock()
        self.watchers: Sequence[Callable[[Gradients], None]] = ()
        """Called with the gradients of every step before they are applied."""
        self.task_watchers: Sequence[tuple[Callable[[int], bool], Callable[[TaskGradients], None]]] = ()
        """Asked before every step whether they want the gradients of the tasks, and called with them."""
        # Kinds of tasks are asked for once: to look whether an object follows a protocol takes 17 microseconds.
        self._several = task if isinstance(task, SeveralTasks) else None
        self._count_ahead = task.counts if isinstance(task, CountsAhead) else None
        self._buffers = BufferGuard(model)
        self._flops = flops
        self._is_checked = False  # once is enough: what a task returns
        self._counted = 0  # the version of the tasks for which FLOPs were counted
        self._balance: Balance | None = None
        self._look: GradientLook | None = None
        if isinstance(task, MultiTask):
            self._balance = make_balance(task, model, self.world, precision, updater.params, self.task)

    @explained
    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:  # noqa: C901
        """Zero the gradients, run every micro-batch forward and backward, divide, clip, update."""
        self.updater.zero_grad()
        self._buffers.remember()
        balance, looks = self._balance, self._looks()
        sums: dict[str, Tensor] = {}
        counts: Counts = {}
        totals: Counts | None = None
        if balance is not None:
            totals = self._totals_ahead(micro_batches) if len(micro_batches) > 1 else None
            balance.prepare(micro_batches, totals)
        descends, learns = balance is None or balance.descends, False
        for place, batch in enumerate(micro_batches, start=1):
            meets = descends and place == len(micro_batches)  # ranks meet in the last one only
            with nullcontext() if meets else local_gradients(self.model):
                with self.precision.autocast():
                    terms = self.task(self.model, batch, metrics=self.metrics)
                if not self._is_checked:
                    check_terms(terms)
                    self._is_checked = True
                weighted = {name: term for name, term in terms.items() if _has_weight(term)}
                learns = learns or bool(weighted)
                if totals is None and (balance is not None or len(weighted) != 1):
                    totals = self._totals_of(weighted, micro_batches)
                if looks and totals is not None:
                    looks.add(weighted, totals)
                if balance is None or totals is None:
                    self._descend(weighted, totals)
                elif weighted:
                    balance.backward(weighted, totals, partial(self._descend, totals=totals))
                elif meets and self.world.size > 1:  # nothing to learn from in the last one: ranks meet all the same
                    idle_output(self.model).backward()  # type: ignore[no-untyped-call]
            _add_up(terms, sums, counts)
        if not learns:
            self.updater.zero_grad()  # the zeros in which ranks have met are no gradients: nothing is to decay
        # One term: its gradient is still that of the sum. Several: each was divided before the backward pass.
        divisor = self._total(counts[next(iter(weighted))]) if totals is None else 1.0
        if balance is not None and totals is not None:
            balance.finish(sums, totals, self.clock.step)
        if looks:  # before the update, which may change the loss scale
            self._tell(looks)
        if self.world.size > 1:
            check_gradients(self.model, self.updater.params)
            divisor = divisor / self.world.size  # data parallelism averages gradients over ranks; a sum is due
        for watch in self.watchers:
            watch(Gradients(self.model, self.updater.params, divisor, self.precision))
        divisor = self.precision.unscale(divisor)  # now: the update may change the loss scale
        norm, skipped = self.updater.apply(divisor)
        if balance is not None:
            balance.after_update(micro_batches)
        self._buffers.put_back(skipped)
        return StepReport(sums, counts, norm, divisor, skipped, self.updater.lr, *self._amounts(micro_batches))

    def set_notice(self, notice: Callable[[str, Mapping[str, Any]], None]) -> None:
        """Let what a step has to say go to `notice`."""
        if self._balance is not None:
            self._balance.notice = notice

    def end_epoch(self, means: Mapping[str, float]) -> None:
        """Take in the averages of an epoch, which some weightings of tasks look at."""
        if self._balance is not None:
            self._balance.end_epoch(means)

    def _descend(self, weighted: Terms, totals: Counts | None) -> None:
        objective = _objective(weighted, totals)
        if not objective.requires_grad:
            raise TrainingError(
                "the loss does not depend on any parameter that is trained: look for .detach(), .item(), argmax, "
                "torch.no_grad() or frozen layers between the parameters and the loss"
            )
        self.precision.scale(objective).backward()  # type: ignore[no-untyped-call]

    def _looks(self) -> GradientLook | None:
        """Return what looks at the tasks' gradients in this step, if somebody wants them."""
        step = self.clock.step
        if not any(wants(step) for wants, _ in self.task_watchers) or self._balance is None:
            return None
        if self._look is None:
            self._look = GradientLook(self._balance.names, self.model, self.world, self.precision)
        self._look.begin()
        return self._look

    def _tell(self, looks: GradientLook) -> None:
        if not looks.has_any:
            return
        found = looks.gradients(self.clock.step)
        for wants, tell in self.task_watchers:
            if wants(self.clock.step):
                tell(found)

    def _amounts(self, micro_batches: Sequence[Batch]) -> tuple[int, Tensor | int, float]:
        """Return the samples, tokens and FLOPs of a step."""
        samples, flops = 0, 0.0
        tokens: Tensor | int = 0
        if self._several is not None and self._flops is not None and self._several.version != self._counted:
            self._flops.forget()
            self._counted = self._several.version
        for batch in micro_batches:
            samples += num_samples(batch)
            for part in batch if isinstance(batch, JointBatch) else (batch,):
                if (ids := token_ids(part)) is not None:
                    tokens = tokens + count_tokens(part, ids)
                    if self._flops is not None:
                        flops += self._flops(part, rows=ids.shape[0], length=ids.shape[1])
        return samples, tokens, flops

    def _totals_of(self, weighted: Terms, micro_batches: Sequence[Batch]) -> Counts:
        """Return the counts of several terms over the whole step, after the forward pass of its first micro-batch."""
        if not weighted:
            # Tasks of weight 0, at the start of a ramp for one, are only watched.
            if isinstance(self.tasks, MultiTask) and any(self.tasks.is_for(batch) for batch in micro_batches):
                return {}
            raise TrainingError(f"{_nothing_to_learn(micro_batches)}: there is nothing to learn from")
        if len(micro_batches) == 1:
            return self._totals({name: term.count for name, term in weighted.items()})
        return self._totals_ahead(micro_batches, weighted)

    def _totals_ahead(self, micro_batches: Sequence[Batch], names: Iterable[str] = ()) -> Counts:
        """Return the counts of terms over the whole step from its batches alone."""
        totals: Counts = dict.fromkeys(names, 0.0)
        for batch in micro_batches:
            ahead = self._count_ahead(batch) if self._count_ahead is not None else None
            if ahead is None:
                several = f" ({', '.join(totals)})" if totals else ""
                raise TrainingError(
                    f"the loss has several terms{several}: with gradient accumulation its task must "
                    f"define `counts(batch)`; or set grad_accum_steps to 1"
                )
            wanted = totals.keys() if names else ahead.keys()
            totals |= {name: totals.get(name, 0.0) + ahead[name] for name in wanted}
        if not totals:
            raise TrainingError(f"{_nothing_to_learn(micro_batches)}: there is nothing to learn from")
        return self._totals(totals)

    def _totals(self, counts: Counts) -> Counts:
        """Return counts over all ranks, none of them 0."""
        if self.world.size > 1:
            row = torch.stack([_on_device(count, self.updater.device) for count in counts.values()])
            counts = dict(zip(counts, self.world.sum(row).unbind(), strict=True))
        return {name: _nonzero(count) for name, count in counts.items()}

    def _total(self, count: Tensor | float) -> Tensor | float:
        return _nonzero(count) if self.world.size == 1 else self._totals({"": count})[""]


def _nothing_to_learn(micro_batches: Sequence[Batch]) -> str:
    streams = {str(batch[STREAM]) for batch in micro_batches if isinstance(batch, Mapping) and STREAM in batch}
    if streams:
        return f"no task that is active now learns from the stream {' or '.join(sorted(streams))}"
    keys = [str(key) for key in micro_batches[0]] if isinstance(micro_batches[0], Mapping) else []
    held = f" for batches that hold {', '.join(keys)}" if keys else ""
    return f"the loss has no term with a weight other than 0{held}"


def _on_device(count: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(count, Tensor):
        return count.to(device, torch.float64)
    return torch.full((), count, dtype=torch.float64, device=device)  # a copy would make the host wait


def _nonzero(count: Tensor | float) -> Tensor | float:
    if isinstance(count, Tensor):
        return count.clamp_min(SMALLEST_COUNT)
    return float(max(count, SMALLEST_COUNT))


def _has_weight(term: LossTerm) -> bool:
    return isinstance(term.weight, Tensor) or term.weight != 0


def _objective(weighted: Terms, totals: Counts | None) -> Tensor:
    """Return Σ weight·sum/total, or weight·sum of the only term if the division is left to the update."""
    parts = []
    for name, term in weighted.items():
        part = term.sum if isinstance(term.weight, float) and term.weight == 1.0 else term.sum * term.weight
        parts.append(part if totals is None else part / totals[name])
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _add_up(terms: Terms, sums: dict[str, Tensor], counts: Counts) -> None:
    for name, term in terms.items():
        if name.endswith(f"/{PENALTY}"):  # no number of a task; its mean would depend on how ranks share the labels
            continue
        value = term.sum.detach() if term.sum.requires_grad else term.sum
        sums[name] = sums[name] + value if name in sums else value
        counts[name] = counts[name] + term.count if name in counts else term.count
