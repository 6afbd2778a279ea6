"""The doors to the engine for Python users: `Trainer`, loops by epoch, and training from plain functions."""

from etude.trainer.assembly import planned_steps
from etude.trainer.basic import BasicTrainingLoop
from etude.trainer.config import TRAINING_ALIASES, TrainerConfig
from etude.trainer.device import configure_cuda_performance, make_deterministic, resolve_device
from etude.trainer.functions import training_step
from etude.trainer.loops import TrainingLoop
from etude.trainer.results import EpochResult
from etude.trainer.trainer import Trainer
from etude.trainer.validation import ValidationLoop

__all__ = [
    "TRAINING_ALIASES",
    "BasicTrainingLoop",
    "EpochResult",
    "Trainer",
    "TrainerConfig",
    "TrainingLoop",
    "ValidationLoop",
    "configure_cuda_performance",
    "make_deterministic",
    "planned_steps",
    "resolve_device",
    "training_step",
]
