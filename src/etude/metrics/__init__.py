"""Metrics that are exact over batches and ranks, and trackers for loops."""

from etude.metrics.accuracy import Accuracy, accuracy_counts
from etude.metrics.base import Meter, Metric
from etude.metrics.trackers import LossTracker, TrainingMetrics

__all__ = ["Accuracy", "LossTracker", "Meter", "Metric", "TrainingMetrics", "accuracy_counts"]
