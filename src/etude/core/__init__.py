"""The words every other room shares: batches, loss terms, clock, control, errors, randomness, vocabularies."""

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
from etude.core.terms import LossTerm, Task, Terms
from etude.core.vocab import Modality, VocabSpec, build_vocab_spec

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
    "Modality",
    "RunFolderError",
    "StepReport",
    "Task",
    "Terms",
    "TrainingError",
    "VocabSpec",
    "batch_labels",
    "build_vocab_spec",
    "map_tensors",
    "num_samples",
    "to_device",
]
