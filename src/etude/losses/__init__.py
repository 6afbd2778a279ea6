"""Losses as sums and counts, and the strategies that read model outputs."""

from etude.losses.functional import accuracy_term, cross_entropy, cross_entropy_term, mean_of
from etude.losses.inferred import InferredLoss, as_strategy, infer_strategy
from etude.losses.outputs import logits_of
from etude.losses.strategies import (
    ClassificationLoss,
    LanguageModelingLoss,
    LossStrategy,
    SegmentationLoss,
    TextClassificationLoss,
    VisionClassificationLoss,
)
from etude.losses.task import SupervisedTask
from etude.losses.wrapped import FunctionLoss

__all__ = [
    "ClassificationLoss",
    "FunctionLoss",
    "InferredLoss",
    "LanguageModelingLoss",
    "LossStrategy",
    "SegmentationLoss",
    "SupervisedTask",
    "TextClassificationLoss",
    "VisionClassificationLoss",
    "accuracy_term",
    "as_strategy",
    "cross_entropy",
    "cross_entropy_term",
    "infer_strategy",
    "logits_of",
    "mean_of",
]
