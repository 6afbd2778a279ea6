"""`EpochResult`: what one epoch of training or validation came to."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from etude.losses.perplexity import perplexity


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Numbers of one epoch; `to_dict` and `from_dict` make it JSON and back.

    >>> result = EpochResult(epoch=0, loss=0.5, duration_s=2.0, num_samples=100, nll=0.0)
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
    nll: float | None = None
    """Mean cross entropy in nats per label, without label smoothing and other terms; None if it is not known."""
    num_tokens: int = 0
    """Tokens, padding left out; 0 if the batches held something else."""
    mfu: float | None = None
    """Share of the device's peak arithmetic that the model made use of."""
    data_wait: float | None = None
    """Share of the time in which steps waited for data."""

    @property
    def perplexity(self) -> float | None:
        """exp(nll): between how many labels the model chooses; None where there is no cross entropy."""
        return None if self.nll is None else perplexity(self.nll)

    @property
    def samples_per_s(self) -> float:
        """Throughput over the epoch."""
        return self.num_samples / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the epoch; None where there are none."""
        return self.num_tokens / self.duration_s if self.num_tokens and self.duration_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, perplexity and throughput as plain numbers."""
        rates = {"samples_per_s": self.samples_per_s, "tokens_per_s": self.tokens_per_s}
        return {**asdict(self), "perplexity": self.perplexity, **rates}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EpochResult":
        """Return the result that `to_dict` wrote."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})
