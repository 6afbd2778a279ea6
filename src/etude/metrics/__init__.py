"""Metrics that are exact over batches and ranks, and trackers for loops."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.metrics.accuracy import Accuracy
    from etude.metrics.base import Measure, Meter, Metric, Tally
    from etude.metrics.classification import F1, BalancedAccuracy, ConfusionMatrix, Precision, Recall
    from etude.metrics.metric_set import MetricSet
    from etude.metrics.probabilities import CalibrationError, Perplexity
    from etude.metrics.ranking import AUROC, AveragePrecision
    from etude.metrics.regression import MAE, MSE, R2, RMSE, Spearman
    from etude.metrics.trackers import LossTracker, TrainingMetrics

__all__ = [
    "AUROC",
    "F1",
    "MAE",
    "MSE",
    "R2",
    "RMSE",
    "Accuracy",
    "AveragePrecision",
    "BalancedAccuracy",
    "CalibrationError",
    "ConfusionMatrix",
    "LossTracker",
    "Measure",
    "Meter",
    "Metric",
    "MetricSet",
    "Perplexity",
    "Precision",
    "Recall",
    "Spearman",
    "Tally",
    "TrainingMetrics",
]

__getattr__ = load_late(__name__, __file__)
