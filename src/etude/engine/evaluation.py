"""Evaluation: the model in eval mode, no gradients, sums and counts exact over batches and ranks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from etude.core import Loader, Task, Terms
from etude.core.batch import is_empty
from etude.core.model import unwrap
from etude.core.random import aside
from etude.core.task import as_task, check_terms
from etude.distributed import World, share_buffers
from etude.engine.explain import explained
from etude.engine.precision import Precision
from etude.engine.stopping import Interrupted, Interrupts


@explained
def evaluate(
    model: nn.Module,
    task: Task | Callable[..., Terms],
    loader: Loader,
    *,
    precision: Precision | None = None,
    world: World | None = None,
    interrupts: Interrupts | None = None,
) -> dict[str, float]:
    """Return the mean of every term over one epoch of `loader`, metrics and derived numbers included.

    What model or data draw is the same in every evaluation, and leaves the caller's generators as they were.
    Batches without samples are passed over. Raises DataError if there is no other batch, and TrainingError if the task
    reports nothing of them, unless the task allows that: there are no numbers then. Terms that are optional may all be
    without a number. The host reads the device once, at the end. With several ranks each evaluates its share of the
    data, with the buffers of rank 0; every rank must call this together. With `interrupts` that allow it a signal ends
    it between two batches: Interrupted is raised on every rank.
    """
    task = as_task(task)
    precision = precision if precision is not None else Precision("fp32")
    world = world if world is not None else World()
    model = unwrap(model)  # ranks may have different numbers of batches, so none may wait for another inside
    if world.size > 1:
        share_buffers(model, world)
    pollable = interrupts if interrupts is not None and interrupts.may_cut_off else None
    with task.measuring():
        with eval_mode(model), torch.no_grad(), aside(0):
            totals, is_cut_off = _add_up(model, task, loader, precision, pollable)
        if pollable is not None and world.host_max([int(is_cut_off)])[0]:
            # Ranks ask each other here, once: their numbers of batches may differ.
            raise Interrupted("the validation was cut off by a signal")
        device = next((tensor.device for tensor in (*totals.sums.values(), *model.parameters())), torch.device("cpu"))
        means = totals.means(world, device)
        if means is None and not world.host_max([int(totals.has_batch)])[0]:
            task.no_data()
            return {}
        measured = task.measured(lambda counts: world.sum(counts.to(device)))
        if means is None and not measured:
            task.no_numbers()
            return {}
        return task.ordered({**({} if means is None else task.summary(means)), **measured})


class _Sums:
    """Sums and counts of terms, added up in float64 on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.optional: set[str] = set()
        self.has_batch = False

    def add(self, terms: Terms) -> None:
        self.has_batch = True
        for name, term in terms.items():
            if not term.reported:
                continue
            zero = torch.zeros((), dtype=torch.float64, device=term.sum.device)
            self.sums[name] = self.sums.get(name, zero) + term.sum
            self.counts[name] = self.counts.get(name, zero) + term.count
            if term.optional:
                self.optional.add(name)

    def means(self, world: World, device: torch.device) -> dict[str, float] | None:
        """Return the averages over all ranks; None if no term is reported on any of them."""
        names = world.union(list(self.sums))
        if not names:
            return None
        optional = world.union(sorted(self.optional))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        pairs = [torch.stack([self.sums.get(name, zero), self.counts.get(name, zero)]) for name in names]
        rows = world.sum(torch.stack(pairs)).tolist()
        return {
            name: total / count if count else math.nan
            for name, (total, count) in zip(names, rows, strict=True)
            if count or name not in optional
        }


def _add_up(
    model: nn.Module, task: Task, loader: Loader, precision: Precision, pollable: Interrupts | None
) -> tuple[_Sums, bool]:
    """Return sums and counts of all terms over this rank's batches, and whether a signal cut them off."""
    sums = _Sums()
    batches = loader.iterate(epoch=0)
    try:
        for batch in batches:
            if pollable is not None and pollable.requested:
                return sums, True
            if is_empty(batch):
                continue  # one of several ranks may have no samples in the last batch
            with precision.autocast():
                terms = task(model, batch, metrics=True)
            check_terms(terms)
            sums.add(terms)
    finally:
        batches.close()
    return sums, False


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule into eval mode, and afterwards back into the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
