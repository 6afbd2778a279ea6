"""Losses as sums and counts, and the strategies that apply them to model outputs."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.losses.binary import BinaryLoss, MultiLabelLoss, binary_cross_entropy, multi_label_bce
    from etude.losses.functional import cross_entropy, cross_entropy_loss, mean_of
    from etude.losses.language import LanguageModelingLoss, MaskedLanguageModelingLoss
    from etude.losses.linear import linear_cross_entropy, linear_cross_entropy_terms
    from etude.losses.strategies import (
        ClassificationLoss,
        LossStrategy,
        SegmentationLoss,
        TextClassificationLoss,
        VisionClassificationLoss,
        logits_of,
    )
    from etude.losses.task import SupervisedTask, as_strategy
    from etude.losses.wrapped import FunctionLoss

__all__ = [
    "BinaryLoss",
    "ClassificationLoss",
    "FunctionLoss",
    "LanguageModelingLoss",
    "LossStrategy",
    "MaskedLanguageModelingLoss",
    "MultiLabelLoss",
    "SegmentationLoss",
    "SupervisedTask",
    "TextClassificationLoss",
    "VisionClassificationLoss",
    "as_strategy",
    "binary_cross_entropy",
    "cross_entropy",
    "cross_entropy_loss",
    "linear_cross_entropy",
    "linear_cross_entropy_terms",
    "logits_of",
    "mean_of",
    "multi_label_bce",
]

__getattr__ = load_late(__name__, __file__)
