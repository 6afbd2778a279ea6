"""The metric by which a run is judged: whether less or more of it is better, its last and its best value."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from etude.core.errors import ConfigError
from etude.core.spelling import did_you_mean

Mode = Literal["min", "max"]

_WORDS: dict[Mode, str] = {
    "min": "loss error err mae mse rmse nll ppl perplexity entropy wer cer ece brier distance divergence kl fid",
    "max": "accuracy acc f1 fbeta precision recall sensitivity specificity auroc auc auprc ap map mrr ndcg r2 spearman "
    "pearson correlation kappa mcc iou miou dice jaccard bleu rouge chrf psnr ssim reward score",
}
"""Words of metric names that tell what is better."""
DEFAULT_MONITOR = "val_loss"
OTHER_NAMES = {"acc": "accuracy", "val_acc": "val_accuracy", "accuracy": "acc", "val_accuracy": "val_acc"}
"""Metrics that have two names."""


def known_mode(name: str) -> Mode | None:
    """Return whether the smallest or the largest value of a metric is the best; None if its name does not tell.

    >>> known_mode("val_loss"), known_mode("val_quality/f1_class0"), known_mode("val_calibration_error")
    ('min', 'max', 'min')
    >>> known_mode("val_thing") is None
    True
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((mode for mode, known in _WORDS.items() if words & set(known.split())), None)


def mode_of(name: str, mode: Mode | None, owner: str) -> Mode:
    """Return the given mode, or the known one of a metric; raise ConfigError if there is neither, or it is wrong."""
    if mode is not None and mode not in get_args(Mode):
        raise ConfigError(f"{owner}: mode must be 'min' or 'max', found {mode!r}")
    known = known_mode(name)
    if mode is None and known is None:
        words = [f"{before}{word}" for known in _WORDS.values() for word in known.split() for before in ("", "val_")]
        hint = did_you_mean(name, words)
        raise ConfigError(f"{owner}: '{name}' is no known metric: set mode to min or max to say what is better{hint}")
    if mode == "min" and name.removeprefix("val_") in ("acc", "accuracy"):
        raise ConfigError(f"{owner}: monitor={name!r} with mode='min' would keep the worst value; set mode='max'")
    return mode or known or "min"


def odd_mode(name: str, mode: Mode) -> str | None:
    """Return a warning if `mode` contradicts the name of a metric, so that its worst value is the best; else None.

    >>> odd_mode("val_loss", "max")
    "the largest 'val_loss' counts as the best, because mode is max; the usual mode of this metric is min"
    >>> odd_mode("val_loss", "min"), odd_mode("val_thing", "max")
    (None, None)
    """
    if (known := known_mode(name)) in (None, mode):
        return None
    which = "smallest" if mode == "min" else "largest"
    return (
        f"the {which} '{name}' counts as the best, because mode is {mode}; the usual mode of this metric is {known}"
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """A value of the monitored metric."""

    value: float
    step: int
    epoch: int
    """Counted from 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of the same validation."""


@dataclass(slots=True)
class Best:
    """The monitored metric of a run.

    >>> best = Best("val_accuracy", "max")
    >>> best.add(0.9, 100, 1), best.add(0.8, 200, 2), best.add(float("nan"), 300, 3)
    (True, False, False)
    >>> best.best.step, best.last.step
    (100, 300)
    """

    name: str = DEFAULT_MONITOR
    mode: Mode = "min"
    last: Measured | None = None
    best: Measured | None = None
    restored: bool = False
    """Whether the model has the weights of the best value again."""

    def add(self, value: float, step: int, epoch: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Record a value; return whether it is the best so far. A non-finite value never is."""
        self.last = Measured(float(value), step, epoch, dict(metrics or {}))
        if not math.isfinite(value) or (self.best is not None and not self._is_better(value, self.best.value)):
            return False
        self.best = self.last
        return True

    def plain(self) -> dict[str, Any]:
        """Return name, mode, last and best as plain data; empty if nothing was measured."""
        return asdict(self) if self.last is not None else {}

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other
