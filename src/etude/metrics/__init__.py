"""Metrics that are exact over batches and ranks, and trackers for loops."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.metrics.accuracy import Accuracy, accuracy_counts
    from etude.metrics.base import Meter, Metric, Tally
    from etude.metrics.classification import F1, ClassScore, ConfusionMatrix, Precision, Recall
    from etude.metrics.trackers import LossTracker, TrainingMetrics

__all__ = [
    "F1",
    "Accuracy",
    "ClassScore",
    "ConfusionMatrix",
    "LossTracker",
    "Meter",
    "Metric",
    "Precision",
    "Recall",
    "Tally",
    "TrainingMetrics",
    "accuracy_counts",
]

__getattr__ = load_late(__name__, __file__)
