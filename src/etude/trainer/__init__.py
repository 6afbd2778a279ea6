"""The Python interface to the engine: `Trainer`, loops by epoch, and training from plain functions."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.trainer.config import TRAINING_ALIASES, TrainerConfig
    from etude.trainer.loaders import planned_steps
    from etude.trainer.loops.basic import BasicTrainingLoop
    from etude.trainer.loops.functions import training_step
    from etude.trainer.loops.results import EpochResult
    from etude.trainer.loops.training import TrainingLoop
    from etude.trainer.loops.validation import ValidationLoop
    from etude.trainer.machine import configure_cuda_performance, make_deterministic, resolve_device
    from etude.trainer.prediction import predict
    from etude.trainer.trainer import Trainer

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
    "predict",
    "resolve_device",
    "training_step",
]

__getattr__ = load_late(__name__, __file__)
