"""Doors for people who write the outer loop themselves, or train from plain functions."""

from etude.trainer.loops.basic import BasicTrainingLoop
from etude.trainer.loops.functions import training_step
from etude.trainer.loops.results import EpochResult
from etude.trainer.loops.training import TrainingLoop
from etude.trainer.loops.validation import ValidationLoop

__all__ = ["BasicTrainingLoop", "EpochResult", "TrainingLoop", "ValidationLoop", "training_step"]
