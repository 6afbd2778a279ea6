"""Losses as sums and counts, and the strategies that apply them to model outputs."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.losses.binary import (
        BinaryLoss as BinaryLoss,
        MultiLabelLoss as MultiLabelLoss,
        binary_cross_entropy as binary_cross_entropy,
        multi_label_bce as multi_label_bce,
    )
    from etude.losses.functional import (
        cross_entropy as cross_entropy,
        cross_entropy_loss as cross_entropy_loss,
        mean_of as mean_of,
    )
    from etude.losses.language import (
        LanguageModelingLoss as LanguageModelingLoss,
        MaskedLanguageModelingLoss as MaskedLanguageModelingLoss,
    )
    from etude.losses.linear import (
        linear_cross_entropy as linear_cross_entropy,
        linear_cross_entropy_terms as linear_cross_entropy_terms,
    )
    from etude.losses.strategies import (
        ClassificationLoss as ClassificationLoss,
        LossStrategy as LossStrategy,
        SegmentationLoss as SegmentationLoss,
        TextClassificationLoss as TextClassificationLoss,
        VisionClassificationLoss as VisionClassificationLoss,
        logits_of as logits_of,
    )
    from etude.losses.task import SupervisedTask as SupervisedTask, as_strategy as as_strategy
    from etude.losses.wrapped import FunctionLoss as FunctionLoss


__getattr__ = load_late(__name__, __file__)
