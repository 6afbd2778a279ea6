"""Ranks that run a divided model equally often: one without samples runs it on a batch of another, for nothing."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from etude.core.batch import Batch, is_empty, tensors_in, to_device
from etude.core.task import Terms
from etude.distributed.world import World


class Spare:
    """A batch with samples, for a rank that has none: that of an earlier step, or at first of another rank.

    Its loss is multiplied by 0, and a NaN would stay one: so the first batch with a finite loss is kept.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._batch: Batch | None = None
        self._is_shared = False
        self._is_kept = False

    def instead_of(self, batch: Batch | None) -> Batch | None:
        """Return the batch if it has samples, else another one; None if no rank has ever had one.

        All ranks must call this together.
        """
        has_samples = batch is not None and not is_empty(batch)
        if has_samples and not self._is_kept:
            self._batch = batch
        if not self._is_shared:
            self._share()
        return batch if has_samples else self._batch

    def judge(self, terms: Terms) -> None:
        """Keep the last batch from now on if its losses are finite; until then this synchronises."""
        self._is_kept = self._is_kept or all(bool(term.sum.isfinite()) for term in terms.values() if term.is_weighted)

    def _share(self) -> None:
        """Give a batch of another rank to those without, once."""
        holders = [rank for rank, text in enumerate(self._world.gather_text("x" * (self._batch is not None))) if text]
        self._is_shared = bool(holders)
        if not holders or len(holders) == self._world.size:
            return
        found: list[Batch] = [None, "cpu"]
        if self._batch is not None:
            kinds = (one.device.type for one in tensors_in(self._batch))
            found = [to_device(self._batch, torch.device("cpu")), next(kinds, "cpu")]
        dist.broadcast_object_list(found, group=self._world.host_group, group_src=holders[0])
        if self._batch is None:
            batch, kind = found
            self._batch = to_device(batch, torch.device(kind))


def rounds(
    batches: Iterable[Batch], world: World, is_cut_off: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches of an evaluation, and whether each has samples; nothing more once it is cut off.

    Ranks in lockstep get equally many: those without samples a batch of another. Other ranks get their own batches.
    """
    if not world.in_lockstep:
        for batch in batches:
            if is_cut_off():
                return
            yield batch, not is_empty(batch)
        return
    spare, iterator, everyone = Spare(world), iter(batches), world.parent or world
    while True:
        batch = next(iterator, None)
        any_left, anyone_stops = everyone.host_max([int(batch is not None), int(is_cut_off())])
        if anyone_stops or not any_left:
            return
        used = spare.instead_of(batch)
        if used is not None:
            yield used, batch is not None and not is_empty(batch)
