"""One training step: forward and backward over the micro-batches, one division, one update.

A task returns sums and counts. The gradients of the sums add up over micro-batches and ranks, and are divided once
by the count over all of them: k micro-batches of b samples are one batch of k·b samples, with any masks.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from etude.core import Batch, LossTerm, StepReport, Task, Terms, TrainingError, num_samples
from etude.core.terms import CountsAhead
from etude.core.tokens import count_tokens, token_ids
from etude.distributed import RankTask, World, check_gradients, local_gradients
from etude.engine.buffers import BufferGuard
from etude.engine.callback import Gradients
from etude.engine.flops import ForwardFlops
from etude.engine.precision import Precision
from etude.engine.update import Updater

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
        self.task = task if self.world.size == 1 else RankTask(task, self.world)
        self.metrics = metrics
        self.watchers: Sequence[Callable[[Gradients], None]] = ()
        """Called with the gradients of every step before they are applied."""
        self._count_ahead = task.counts if isinstance(task, CountsAhead) else None
        self._buffers = BufferGuard(model)
        self._flops = flops

    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Zero the gradients, run every micro-batch forward and backward, divide, clip, update."""
        self.updater.zero_grad()
        self._buffers.remember()
        sums: dict[str, Tensor] = {}
        counts: Counts = {}
        samples = 0
        tokens: Tensor | int = 0
        flops = 0.0
        totals: Counts | None = None
        for place, batch in enumerate(micro_batches, start=1):
            is_last = place == len(micro_batches)
            with nullcontext() if is_last else local_gradients(self.model):  # ranks meet in the last one only
                with self.precision.autocast():
                    terms = self.task(self.model, batch, metrics=self.metrics)
                weighted = {name: term for name, term in terms.items() if _has_weight(term)}
                if totals is None and len(weighted) != 1:
                    totals = self._totals_of(weighted, micro_batches)
                objective = _objective(weighted, totals)
                self.precision.scale(objective).backward()  # type: ignore[no-untyped-call]
            _add_up(terms, sums, counts)
            samples += num_samples(batch)
            if (ids := token_ids(batch)) is not None:
                tokens = tokens + count_tokens(batch, ids)
                if self._flops is not None:
                    flops += self._flops(batch, rows=ids.shape[0], length=ids.shape[1])
        # One term: its gradient is still that of the sum. Several: each was divided before the backward pass.
        divisor = self._total(counts[next(iter(weighted))]) if totals is None else 1.0
        if self.world.size > 1:
            check_gradients(self.model, self.updater.params)
            divisor = divisor / self.world.size  # data parallelism averages gradients over ranks; a sum is due
        for watch in self.watchers:
            watch(Gradients(self.model, self.updater.params, divisor, self.precision))
        norm, skipped = self.updater.apply(divisor)
        self._buffers.put_back(skipped)
        return StepReport(sums, counts, norm, divisor, skipped, self.updater.lr, samples, tokens, flops)

    def _totals_of(self, weighted: Terms, micro_batches: Sequence[Batch]) -> Counts:
        """Return the counts of several terms over the whole step, after the forward pass of its first micro-batch."""
        if not weighted:
            raise TrainingError("the loss has no term with a weight other than 0: there is nothing to learn from")
        if len(micro_batches) == 1:
            return self._totals({name: term.count for name, term in weighted.items()})
        totals: Counts = dict.fromkeys(weighted, 0.0)
        for batch in micro_batches:
            ahead = self._count_ahead(batch) if self._count_ahead is not None else None
            if ahead is None:
                raise TrainingError(
                    f"the loss has several terms ({', '.join(weighted)}): with gradient accumulation its task must "
                    f"define `counts(batch)`; or set grad_accum_steps to 1"
                )
            totals = {name: total + ahead[name] for name, total in totals.items()}
        return self._totals(totals)

    def _totals(self, counts: Counts) -> Counts:
        """Return counts over all ranks, none of them 0."""
        if self.world.size > 1:
            row = torch.stack([_on_device(count, self.updater.device) for count in counts.values()])
            counts = dict(zip(counts, self.world.sum(row).unbind(), strict=True))
        return {name: _nonzero(count) for name, count in counts.items()}

    def _total(self, count: Tensor | float) -> Tensor | float:
        return _nonzero(count) if self.world.size == 1 else self._totals({"": count})[""]


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
        value = term.sum.detach() if term.sum.requires_grad else term.sum
        sums[name] = sums[name] + value if name in sums else value
        counts[name] = counts[name] + term.count if name in counts else term.count
