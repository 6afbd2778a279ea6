"""Metrics that are exact over batches and ranks, and trackers for loops."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.metrics.accuracy import Accuracy as Accuracy
    from etude.metrics.base import Measure as Measure, Meter as Meter, Metric as Metric, Tally as Tally
    from etude.metrics.classification import (
        F1 as F1,
        BalancedAccuracy as BalancedAccuracy,
        ConfusionMatrix as ConfusionMatrix,
        Precision as Precision,
        Recall as Recall,
    )
    from etude.metrics.metric_set import MetricSet as MetricSet
    from etude.metrics.probabilities import CalibrationError as CalibrationError, Perplexity as Perplexity
    from etude.metrics.ranking import AUROC as AUROC, AveragePrecision as AveragePrecision
    from etude.metrics.regression import MAE as MAE, MSE as MSE, R2 as R2, RMSE as RMSE, Spearman as Spearman
    from etude.metrics.trackers import LossTracker as LossTracker, TrainingMetrics as TrainingMetrics


__getattr__ = load_late(__name__, __file__)
