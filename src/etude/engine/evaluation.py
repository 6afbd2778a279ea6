"""Evaluation: the model in eval mode, no gradients, sums and counts exact over batches and ranks."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from etude.core import DataError, Loader, Task
from etude.core.calling import unwrap
from etude.core.random import aside
from etude.core.terms import Measures, SeveralTasks, check_terms, derive, in_order
from etude.distributed import World, is_empty, share_buffers
from etude.engine.interrupt import Interrupted, Interrupts
from etude.engine.misfit import explained
from etude.engine.precision import Precision

logger = logging.getLogger("etude")


@explained
def evaluate(
    model: nn.Module,
    task: Task,
    loader: Loader,
    *,
    precision: Precision | None = None,
    world: World | None = None,
    interrupts: Interrupts | None = None,
) -> dict[str, float]:
    """Return the mean of every term over one epoch of `loader`, metrics and derived numbers included.

    What model or data draw is the same in every evaluation, and leaves the caller's generators as they were.
    Raises DataError if the loader gives no batch at all; of several tasks those that are active may have no data here,
    and there are no numbers then. The host reads the device once, at the end. With several ranks each evaluates its
    share of the data, with the buffers of rank 0; every rank must call this together. With
    `interrupts` that allow it a signal ends it between two batches: Interrupted is raised on every rank.
    """
    precision = precision if precision is not None else Precision("fp32")
    world = world if world is not None else World()
    model = unwrap(model)  # ranks may have different numbers of batches, so none may wait for another inside
    share_buffers(model, world)
    several = isinstance(task, SeveralTasks)  # of which those without any labels here have no numbers
    pollable = interrupts if interrupts is not None and interrupts.may_cut_off else None
    if isinstance(task, Measures):
        task.start_measuring()
    try:
        with eval_mode(model), torch.no_grad(), aside(0):
            sums, counts, is_cut_off = _add_up(model, task, loader, precision, world, pollable)
        if pollable is not None and world.host_max([int(is_cut_off)])[0]:
            # Ranks ask each other here, once: their numbers of batches may differ.
            raise Interrupted("the validation was cut off by a signal")
    except BaseException:
        if isinstance(task, Measures):
            task.stop_measuring()  # training may go on, and is not to be measured
        raise
    names = world.union(list(sums))
    if not names and several:
        if isinstance(task, Measures):
            task.stop_measuring()
        logger.warning("there is no data here for the tasks that are trained now, so nothing is measured")
        return {}
    if not names:
        raise DataError("the evaluation loader gave no batch: its data is empty, or drop_last dropped all of it")
    device = next((tensor.device for tensor in (*sums.values(), *model.parameters())), None)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    rows = [torch.stack([sums.get(name, zero), counts.get(name, zero)]) for name in names]
    pairs = zip(names, world.sum(torch.stack(rows)).tolist(), strict=True)
    means = {name: total / count if count else math.nan for name, (total, count) in pairs if count or not several}
    numbers = derive(task, means)
    if isinstance(task, Measures):
        numbers |= task.measured(lambda counts: world.sum(counts if device is None else counts.to(device)))
    return in_order(task, numbers)


def _add_up(
    model: nn.Module, task: Task, loader: Loader, precision: Precision, world: World, pollable: Interrupts | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Return sums and counts of all terms over this rank's batches, and whether a signal cut them off."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    batches = loader.iterate(epoch=0)
    try:
        for batch in batches:
            if pollable is not None and pollable.requested:
                return sums, counts, True
            if world.size > 1 and is_empty(batch):
                continue  # the last batch may leave a rank without samples
            with precision.autocast():
                terms = task(model, batch, metrics=True)
            check_terms(terms)
            for name, term in terms.items():
                zero = torch.zeros((), dtype=torch.float64, device=term.sum.device)
                sums[name] = sums.get(name, zero) + term.sum
                counts[name] = counts.get(name, zero) + term.count
    finally:
        batches.close()
    return sums, counts, False


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
