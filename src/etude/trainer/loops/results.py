"""`EpochResult`: the metrics of one epoch of training or validation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from etude.core import Task
from etude.losses import SupervisedTask
from etude.losses.functional import perplexity

_NO_TASKS = ("lr", "grad_norm", "grad_cosine")
"""Metrics with one number per group of parameters, layer or pair: `lr/backbone`."""


@dataclass(frozen=True, slots=True)
class EpochResult:
    """Metrics of one epoch; `to_dict` and `from_dict` convert it to and from JSON data.

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
    """Samples; the number of batches if their samples are unknown."""
    accuracy: float | None = None
    lr: float | None = None
    grad_norm_min: float | None = None
    grad_norm_max: float | None = None
    skipped: int = 0
    """Updates that were skipped because they were not finite."""
    nll: float | None = None
    """Mean cross entropy in nats per label, without label smoothing and other terms; None if unknown."""
    num_tokens: int = 0
    """Tokens without padding; 0 if the batches have none."""
    mfu: float | None = None
    """Share of the device's peak FLOP/s that the model used (MFU)."""
    data_wait: float | None = None
    """Share of the time that steps waited for data."""
    parts: dict[str, float] = field(default_factory=dict, hash=False)
    """All other metrics of the epoch by name: of each task (`code/loss`), of each modality (`loss_img`) …"""

    @property
    def tasks(self) -> dict[str, dict[str, float]]:
        """The metrics of each task, by its name; empty if there is only one task.

        >>> EpochResult(0, 0.5, 1.0, 8, parts={"code/loss": 0.5, "loss_ce": 0.4, "lr/backbone": 1e-4}).tasks
        {'code': {'loss': 0.5}}
        """
        found: dict[str, dict[str, float]] = {}
        for name, value in self.parts.items():
            task, slash, number = name.partition("/")
            if slash and not task.startswith("val_") and task not in _NO_TASKS:
                found.setdefault(task, {})[number] = value
        return found

    @property
    def perplexity(self) -> float | None:
        """exp(nll), the effective number of labels the model chooses from; None without cross entropy."""
        return None if self.nll is None else perplexity(self.nll)

    @property
    def samples_per_s(self) -> float:
        """Throughput over the epoch."""
        return self.num_samples / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def duration(self) -> float:
        """Seconds: `duration_s`."""
        return self.duration_s

    @property
    def throughput(self) -> float:
        """Samples per second: `samples_per_s`."""
        return self.samples_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the epoch; None if there are none."""
        return self.num_tokens / self.duration_s if self.num_tokens and self.duration_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, perplexity and throughput as plain numbers."""
        rates = {"samples_per_s": self.samples_per_s, "tokens_per_s": self.tokens_per_s}
        return {**asdict(self), "perplexity": self.perplexity, **rates}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EpochResult":
        """Return the result that `to_dict` wrote."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})


_OWN = ("accuracy", "lr", "grad_norm_min", "grad_norm_max", "mfu", "data_wait")
_ELSEWHERE = {
    "loss",
    "nll",
    "skipped",
    "grad_norm",
    "samples_per_s",
    "tokens_per_s",
    "tokens",
    "epoch_s",
    "perplexity",
}
"""Metrics of an epoch that a result holds in other fields."""


def epoch_result(
    epoch: int,
    logs: Mapping[str, float],
    duration_s: float,
    num_samples: int,
    num_tokens: float,
    *,
    nll: float | None,
) -> EpochResult:
    """Return the result of an epoch from its metrics by name."""
    own = {name: logs[name] for name in _OWN if name in logs}
    return EpochResult(
        epoch=epoch,
        loss=logs["loss"],
        duration_s=duration_s,
        num_samples=num_samples,
        num_tokens=int(num_tokens),
        skipped=int(logs.get("skipped", 0)),
        nll=nll,
        parts={name: value for name, value in logs.items() if name not in _OWN and name not in _ELSEWHERE},
        **own,
    )


def cross_entropy_of(task: Task, logs: Mapping[str, float]) -> float | None:
    """Return the mean cross entropy among the metrics of an epoch; None for several tasks, or a loss without one."""
    return task.strategy.cross_entropy(logs) if isinstance(task, SupervisedTask) else None
