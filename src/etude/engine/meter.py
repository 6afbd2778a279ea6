"""How much a step was: samples, tokens and FLOPs of its batches, counted beside the step."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from etude.core import Batch, Task, num_samples
from etude.core.batch import JointBatch
from etude.core.tokens import count_tokens, token_ids
from etude.engine.flops import ForwardFlops


class Amounts(NamedTuple):
    """Amounts of one step on this rank."""

    samples: int = 0
    tokens: Tensor | int = 0
    """Padding left out; 0 where batches have none."""
    forward_flops: float = 0.0
    """FLOPs of the forward passes, as far as they are counted: for batches of tokens."""


NO_AMOUNTS = Amounts()


class Meter:
    """Counts the samples, tokens and FLOPs of steps; nothing waits for the device."""

    def __init__(self, task: Task, flops: ForwardFlops | None = None) -> None:
        """Without `flops` none are counted."""
        self._task = task
        self._flops = flops
        self._version = task.version  # for which FLOPs were counted

    def __call__(self, micro_batches: Sequence[Batch]) -> Amounts:
        """Return the amounts of a step."""
        if self._flops is not None and self._version != self._task.version:
            self._flops.forget()
            self._version = self._task.version
        samples, flops = 0, 0.0
        tokens: Tensor | int = 0
        for batch in micro_batches:
            samples += num_samples(batch)
            for part in batch if isinstance(batch, JointBatch) else (batch,):
                if (ids := token_ids(part)) is not None:
                    tokens = tokens + count_tokens(part, ids)
                    if self._flops is not None:
                        flops += self._flops(part, rows=ids.shape[0], length=ids.shape[1])
        return Amounts(samples, tokens, flops)
