"""Evaluation: the model in eval mode, without gradients; sums and counts are exact over batches and ranks."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from etude.core import Batch, Loader, Task, Terms
from etude.core.model import unwrap
from etude.core.random import aside
from etude.core.task import as_task, check_terms
from etude.distributed import World
from etude.distributed.lockstep import rounds
from etude.distributed.parallel import reshard
from etude.distributed.sharing import share_buffers
from etude.distributed.world import note_progress
from etude.engine.captured_evaluation import COUNT, SUM, CapturedEvaluation, EvaluationNumbers
from etude.engine.explain import explained
from etude.engine.precision import MixedPrecision
from etude.engine.stopping import Interrupted, Interrupts


@explained
def evaluate(
    model: nn.Module,
    task: Task | Callable[..., Terms],
    loader: Loader,
    *,
    precision: MixedPrecision | None = None,
    world: World | None = None,
    interrupts: Interrupts | None = None,
    capture: CapturedEvaluation | None = None,
) -> dict[str, float]:
    """Return the mean of every term over one epoch of `loader`, metrics and derived numbers included.

    Random numbers are the same in every evaluation, and the caller's generators are restored. Batches without samples
    are skipped. Raises DataError if there is no other batch, and TrainingError if the task reports no metrics, unless
    the task allows that; the result is then empty. Optional terms may be missing. The host synchronises with the
    device once, at the end. Each rank evaluates its share of the data with the buffers of rank 0; all ranks must call
    this together. If `interrupts` allows it, a signal ends the evaluation between two batches: Interrupted is raised
    on every rank. `capture` runs batches recorded as CUDA graphs.
    """
    task = as_task(task)
    precision = precision if precision is not None else MixedPrecision("fp32")
    world = world if world is not None else World()
    model = unwrap(model)  # ranks may have different numbers of batches, so nothing inside may synchronise them
    if world.size > 1:
        share_buffers(model, world)
    pollable = interrupts if interrupts is not None and interrupts.may_cut_off else None

    def run(batch: Batch) -> Terms:
        with precision.autocast():
            terms = task(model, batch, metrics=True)
        check_terms(terms)
        task.observe(batch)
        return terms

    def lend(batch: Batch) -> None:
        """Run the model only so that ranks with samples can run theirs."""
        with precision.autocast():
            task.lend(model, batch)

    task.measures.begin(training=False)
    with task.measuring():
        with eval_mode(model), torch.no_grad(), aside(0):
            if capture is not None:
                capture.begin(model, task)
            totals, is_cut_off = _add_up(run, lend, loader, world, pollable, capture)
        if pollable is not None and (world.parent or world).host_max([int(is_cut_off)])[0]:
            # The only place where ranks synchronise: their numbers of batches may differ.
            raise Interrupted("a signal interrupted the validation")
        device = next((tensor.device for tensor in (*totals.tensors(), *model.parameters())), torch.device("cpu"))
        means = totals.means(world, device)
        if means is None and not world.host_max([int(totals.has_batch)])[0]:
            task.no_data()
            return {}
        measured = {
            **task.measured(world, device),
            **task.measures.results(world, device, training=False),
        }
        if means is None and not measured:
            task.no_numbers()
            return {}
        return task.ordered({**({} if means is None else task.summary(means)), **measured})


class _Sums:
    """Sums and counts of terms, accumulated in float64 on the device."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[tuple[str, str], ...], Tensor] = {}
        """Keyed by the names of the terms; batches may differ in them."""
        self._host_counts: dict[str, float] = {}
        self.optional: set[str] = set()
        self.has_batch = False

    def add(self, numbers: EvaluationNumbers) -> None:
        self.has_batch = True
        if numbers.vector is None:
            return
        total = self._vectors.get(numbers.places)
        if total is None:
            self._vectors[numbers.places] = numbers.vector.clone()
        else:
            total += numbers.vector
        for name, count in numbers.host_counts.items():
            self._host_counts[name] = self._host_counts.get(name, 0.0) + count
        self.optional |= numbers.optional

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors on the device."""
        return self._vectors.values()

    def means(self, world: World, device: torch.device) -> dict[str, float] | None:
        """Return the averages over all ranks; None if no term is reported on any of them."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        found = {(name, COUNT): zero + count for name, count in self._host_counts.items()}
        for places, vector in self._vectors.items():
            for place, value in zip(places, vector.to(device).unbind(), strict=True):
                found[place] = found.get(place, zero) + value
        names = world.union([name for name, kind in found if kind == SUM])
        if not names:
            return None
        optional = world.union(sorted(self.optional))
        pairs = [torch.stack([found.get((name, kind), zero) for kind in (SUM, COUNT)]) for name in names]
        rows = world.sum(torch.stack(pairs)).tolist()
        return {
            name: total / count if count else math.nan
            for name, (total, count) in zip(names, rows, strict=True)
            if count or name not in optional
        }


def _add_up(
    run: Callable[[Batch], Terms],
    lend: Callable[[Batch], None],
    loader: Loader,
    world: World,
    pollable: Interrupts | None,
    capture: CapturedEvaluation | None,
) -> tuple[_Sums, bool]:
    """Return sums and counts of all terms over this rank's batches, and whether a signal interrupted it.

    `lend` runs a batch of another rank, where all of them must run the model equally often.
    """
    sums, is_cut_off = _Sums(), False

    def requested() -> bool:
        nonlocal is_cut_off
        is_cut_off = pollable is not None and bool(pollable.requested)
        return is_cut_off

    batches = loader.iterate(epoch=0)
    try:
        for batch, has_samples in rounds(batches, world, requested):
            if has_samples:
                sums.add(EvaluationNumbers(run(batch)) if capture is None else capture(run, batch))
            elif world.in_lockstep:
                lend(batch)
            note_progress()
    finally:
        batches.close()
    return sums, is_cut_off


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode, and restore its mode afterwards; weights that were gathered are freed."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(model)
