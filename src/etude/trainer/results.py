"""`EpochResult`: what one epoch of training or validation came to."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Numbers of one epoch; `to_dict` and `from_dict` make it JSON and back.

    >>> result = EpochResult(epoch=0, loss=0.0, duration_s=2.0, num_samples=100)
    >>> result.perplexity, result.samples_per_s
    (1.0, 50.0)
    >>> EpochResult.from_dict(result.to_dict()) == result
    True
    """

    epoch: int
    loss: float
    duration_s: float
    num_samples: int
    accuracy: float | None = None
    lr: float | None = None
    grad_norm_min: float | None = None
    grad_norm_max: float | None = None
    skipped: int = 0
    """Updates that were not finite and were skipped."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def samples_per_s(self) -> float:
        """Throughput over the epoch."""
        return self.num_samples / self.duration_s if self.duration_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, perplexity and throughput as plain numbers."""
        return {**asdict(self), "perplexity": self.perplexity, "samples_per_s": self.samples_per_s}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EpochResult":
        """Return the result that `to_dict` wrote."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})
