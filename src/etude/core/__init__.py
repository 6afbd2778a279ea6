"""The words every other room shares: batches, loss terms, clock, control, errors, randomness."""

from etude.core.batch import Batch, DataBatch, batch_labels, map_tensors, num_samples, to_device
from etude.core.clock import Clock
from etude.core.control import Control
from etude.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EtudeError,
    RunFolderError,
    TrainingError,
)
from etude.core.head import HeadOutput
from etude.core.loader import BatchIterator, Loader
from etude.core.report import StepReport
from etude.core.task import Task
from etude.core.terms import LossTerm, Terms

__all__ = [
    "Batch",
    "BatchIterator",
    "CheckpointError",
    "Clock",
    "ConfigError",
    "Control",
    "DataBatch",
    "DataError",
    "EtudeError",
    "HeadOutput",
    "Loader",
    "LossTerm",
    "RunFolderError",
    "StepReport",
    "Task",
    "Terms",
    "TrainingError",
    "batch_labels",
    "map_tensors",
    "num_samples",
    "to_device",
]
