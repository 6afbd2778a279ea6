"""What one optimizer step leaves behind, still on the device: nothing here has been waited for."""

from collections.abc import Set
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepReport:
    """Device-side results of one step. Reading a tensor here waits for the device: only at log points."""

    sums: dict[str, Tensor]
    """Per term, the sum over this rank's micro-batches (detached)."""
    counts: dict[str, Tensor | float]
    """Per term, the count over this rank's micro-batches."""
    norm: Tensor
    """Global norm of the gradient as the backward pass left it, before it is divided and clipped."""
    divisor: Tensor | float
    """What the gradient is divided by to become that of the averaged loss; in fp16 the loss scale is part of it."""
    skipped: Tensor
    """1.0 if the update was not finite and was skipped on the device, else 0.0."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    optional: Set[str] = frozenset()
    """Terms that have no number where nothing was counted."""

    @property
    def grad_norm(self) -> Tensor:
        """Global gradient norm of the averaged loss, before clipping."""
        return self.norm / self.divisor
