"""Dividing the batches of a step into micro-batches that fit into memory, and repeating a step in smaller ones.

A loss is sums and counts, so a divided step has the gradients of the undivided one, up to rounding. Layers that mix
samples, such as batch norm, see the samples of a micro-batch only.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from etude.core import Batch, DataError, Task
from etude.core.batch import num_samples
from etude.core.division import divide, divide_exactly
from etude.core.random import rewinder
from etude.distributed import World
from etude.engine.explain import is_out_of_memory

logger = logging.getLogger("etude")


class MicroBatchSplitter:
    """Divides batches into micro-batches of at most `size` samples over all ranks; None leaves them whole.

    With `recovers`, a step whose forward or backward pass runs out of memory is done again in micro-batches of half the
    size, as are all later steps. Random numbers are those from before the failed attempt; every micro-batch draws its
    own dropout masks.

    >>> splitter = MicroBatchSplitter(2)
    >>> [part.tolist() for part in splitter.divided([torch.arange(5), torch.arange(2)])]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    def __init__(self, size: int | None = None, *, recovers: bool = False, world: World | None = None) -> None:
        self.given = self.size = size
        self.recovers = recovers
        self.world = world if world is not None else World()
        self.warn: Callable[[str], None] = logger.warning
        self.listeners: list[Callable[[], None]] = []
        """Called when the size changes."""
        self._measured = 0
        """Samples whose metrics an earlier attempt at this step has counted, and this one has not reached yet."""
        self._reached = 0
        self._is_checked = False

    def set(self, size: Any) -> None:
        """Set the size; None leaves batches whole."""
        self.given = self.size = None if size is None else int(size)

    def divided(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches of some batches; raise DataError if a batch cannot be divided.

        All ranks get equally many: they run a divided model together, and exchange counts of terms per step.
        """
        if self.size is None:
            return batches
        most = max(1, self.size // self.world.size)
        counts = self.world.host_max([-(-num_samples(batch) // most) for batch in batches])
        if all(count <= 1 for count in counts):
            return batches
        parts_of = divide if self.world.size == 1 else divide_exactly
        return [part for batch, count in zip(batches, counts, strict=True) for part in parts_of(batch, max(1, count))]

    def run(
        self,
        batches: Sequence[Batch],
        backward: Callable[[Sequence[Batch]], None],
        model: nn.Module,
        undo: Callable[[], None],
    ) -> None:
        """Call `backward` with micro-batches that fit into memory; `undo` is called after an attempt that failed."""
        if not self.recovers or _is_recorded():
            backward(batches if self.size is None else self._known(batches, model))
            return
        rewind, self._measured, self._reached = rewinder(), 0, 0
        micro_batches = batches
        while True:
            # parts of the parts: where an attempt has ended, metrics can go on
            micro_batches = self._known(micro_batches, model)
            is_done = self._attempt(backward, micro_batches)
            largest = max(map(num_samples, micro_batches))
            failed, largest = self.world.host_max([int(not is_done), largest])
            if not failed:
                return
            # outside the except clause, whose error keeps the tensors of the attempt alive
            self._measured, self._reached = max(self._measured, self._reached), 0
            undo()
            rewind()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._halve(largest)

    def observe(self, task: Task, batch: Batch) -> None:
        """Let a task update its metrics, unless an earlier attempt at this step has counted these samples."""
        if not self.recovers:
            task.observe(batch)
            return
        self._reached += num_samples(batch)
        if self._reached > self._measured:
            task.observe(batch)
        elif task.judged is not None:
            task.judged = None

    def state_dict(self) -> dict[str, int]:
        """Return the size that was found, and the one that was set; {} if nothing was found."""
        if self.size is None or self.size == self.given:
            return {}
        return {"size": self.size, "given": self.given or 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the size that was found before, unless another one is set now."""
        size = state["size"] if state and state["given"] == (self.given or 0) else self.given
        if size != self.size:
            self._change(size)

    def _attempt(self, backward: Callable[[Sequence[Batch]], None], micro_batches: Sequence[Batch]) -> bool:
        """Return whether there was enough memory; errors that smaller micro-batches cannot avoid are raised."""
        try:
            backward(micro_batches)
        except Exception as error:
            if not is_out_of_memory(error) or not _can_be_halved(micro_batches):
                raise
            return False
        return True

    def _halve(self, largest: int) -> None:
        """Make micro-batches half as large as the largest of this step on any rank."""
        before, now = largest * self.world.size, -(-largest // 2) * self.world.size
        self._change(now)
        if self.world.is_main:
            self.warn(
                f"out of memory with {before} samples at once: batches are divided into micro-batches of at most {now} "
                "from now on, with the same result; the step is done again"
            )

    def _change(self, size: int | None) -> None:
        self.size = size
        for listen in self.listeners:
            listen()

    def _known(self, batches: Sequence[Batch], model: nn.Module) -> Sequence[Batch]:
        """Return the micro-batches; warn once if a layer depends on how batches are divided."""
        micro_batches = self.divided(batches)
        if len(micro_batches) > len(batches) and not self._is_checked:
            self._is_checked = True
            layers = ((name, one) for name, one in model.named_modules() if isinstance(one, _BatchNorm))
            norm = next((name for name, one in layers if one.training), None)
            if norm is not None and self.world.is_main:
                self.warn(
                    f"batch norm layers, such as '{norm.removeprefix('module.')}', use the statistics of micro-batches "
                    f"of at most {self.size} samples, so the result is not that of whole batches"
                )
        return micro_batches


def _is_recorded() -> bool:
    """Whether a CUDA graph is being captured: then nothing can be done again."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _can_be_halved(micro_batches: Sequence[Batch]) -> bool:
    largest = max(micro_batches, key=num_samples)
    try:
        return len(divide(largest, 2)) == 2
    except DataError:
        return False
