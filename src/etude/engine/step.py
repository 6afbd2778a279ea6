"""One training step: forward and backward over the micro-batches, one division, one update.

A task returns sums and counts. The gradients of the sums add up over micro-batches and ranks, and are divided once
by the count over all of them: k micro-batches of b samples are one batch of k·b samples, with any masks.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from etude.core import Batch, LossTerm, StepReport, Task, Terms, TrainingError, num_samples
from etude.core.terms import CountsAhead
from etude.distributed import World, local_gradients
from etude.engine.precision import Precision
from etude.engine.update import Updater

Counts = dict[str, Tensor | float]


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
    ) -> None:
        """Bind the parts. With `metrics`, terms of weight 0 (accuracy …) are computed in training too."""
        self.model = model
        self.task = task
        self.updater = updater
        self.precision = precision
        self.world = world if world is not None else World()
        self.metrics = metrics
        self._count_ahead = task.counts if isinstance(task, CountsAhead) else None

    def __call__(self, micro_batches: Sequence[Batch]) -> StepReport:
        """Zero the gradients, run every micro-batch forward and backward, divide, clip, update."""
        self.updater.zero_grad()
        sums: dict[str, Tensor] = {}
        counts: Counts = {}
        samples = 0
        totals = self._totals_ahead(micro_batches)
        for place, batch in enumerate(micro_batches, start=1):
            is_last = place == len(micro_batches)
            with nullcontext() if is_last else local_gradients(self.model):  # ranks meet in the last one only
                with self.precision.autocast():
                    terms = self.task(self.model, batch, metrics=self.metrics)
                weighted = {name: term for name, term in terms.items() if _has_weight(term)}
                if totals is None and len(weighted) != 1:
                    totals = self._totals_now(weighted, len(micro_batches))
                objective = _objective(weighted, totals)
                self.precision.scale(objective).backward()  # type: ignore[no-untyped-call]
            _add_up(terms, sums, counts)
            samples += num_samples(batch)
        # One term: its gradient is still that of the sum. Several: each was divided before the backward pass.
        divisor = self._total(counts[next(iter(weighted))]) if totals is None else 1.0
        divisor = divisor / self.world.size  # data parallelism averages gradients over ranks; a sum is due
        norm, skipped = self.updater.apply(divisor)
        return StepReport(sums, counts, norm, divisor, skipped, self.updater.lr, samples)

    def _totals_ahead(self, micro_batches: Sequence[Batch]) -> Counts | None:
        """Return the counts over the whole step before it runs, where that is needed and the task knows them."""
        if len(micro_batches) == 1 or self._count_ahead is None:
            return None
        totals: Counts = {}
        for batch in micro_batches:
            known = self._count_ahead(batch)
            if known is None:
                return None
            for name, count in known.items():
                totals[name] = totals.get(name, 0.0) + count
        return {name: self._total(count) for name, count in totals.items()}

    def _totals_now(self, weighted: Terms, num_micro: int) -> Counts:
        """Return the counts of a step of one micro-batch, which are known after its forward pass."""
        if not weighted:
            raise TrainingError("the loss has no term with a weight other than 0: there is nothing to learn from")
        if num_micro > 1:
            raise TrainingError(
                f"the loss has several terms ({', '.join(weighted)}): with gradient accumulation its task must "
                f"define `counts(batch)`; or set grad_accum_steps to 1"
            )
        return {name: self._total(term.count) for name, term in weighted.items()}

    def _total(self, count: Tensor | float) -> Tensor | float:
        """Return a count over all ranks; 1 where nothing counts, so that its zero gradient is not divided by 0."""
        if self.world.size > 1:
            count = torch.as_tensor(count, dtype=torch.float64).to(self.updater.device)
            count = self.world.sum(count.clone())
        if isinstance(count, Tensor):
            return torch.where(count > 0, count, 1.0).float()
        return float(count) if count > 0 else 1.0


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
        value = term.sum.detach()
        sums[name] = sums[name] + value if name in sums else value
        counts[name] = counts[name] + term.count if name in counts else term.count
