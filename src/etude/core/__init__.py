"""Types that every other package shares: batches, loss terms, clock, control, errors, random state."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.core.batch import Batch, DataBatch, num_samples, to_device
    from etude.core.clock import Clock, Control
    from etude.core.errors import CheckpointError, ConfigError, DataError, EtudeError, RunFolderError, TrainingError
    from etude.core.loader import BatchIterator, Loader
    from etude.core.model import HeadOutput
    from etude.core.report import StepReport
    from etude.core.task import LossTerm, Task, Terms

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
    "num_samples",
    "to_device",
]

__getattr__ = load_late(__name__, __file__)
