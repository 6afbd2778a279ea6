"""What one optimizer step leaves behind, still on the device: nothing here has been waited for."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepReport:
    """Device-side results of one step. Reading a tensor here waits for the device: do it at log points only."""

    sums: dict[str, Tensor]
    """Per term, the sum over this rank's micro-batches (detached)."""
    counts: dict[str, Tensor | float]
    """Per term, the count over this rank's micro-batches."""
    grad_norm: Tensor | None
    """Global gradient norm before clipping, of the averaged loss; None if the updater has no parameters."""
    skipped: Tensor | None
    """1.0 if the update was not finite and was skipped on the device, else 0.0."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    num_samples: int
    """Samples on this rank."""
    num_micro: int
    """Micro-batches in this step."""
