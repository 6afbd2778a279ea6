"""Metrics that are exact over batches and ranks, and trackers for loops."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.metrics.accuracy import Accuracy
    from etude.metrics.base import Meter, Metric, Tally
    from etude.metrics.classification import F1, ConfusionMatrix, Precision, Recall
    from etude.metrics.trackers import LossTracker, TrainingMetrics

__all__ = [
    "F1",
    "Accuracy",
    "ConfusionMatrix",
    "LossTracker",
    "Meter",
    "Metric",
    "Precision",
    "Recall",
    "Tally",
    "TrainingMetrics",
]

__getattr__ = load_late(__name__, __file__)
