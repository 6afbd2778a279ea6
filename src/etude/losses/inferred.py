"""Choosing a loss: from what the user gave, or from the shapes of the first batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from etude.core.batch import Batch
from etude.core.calling import inputs_of, targets_of
from etude.core.errors import TrainingError
from etude.core.terms import Terms
from etude.losses.functional import IGNORE_INDEX
from etude.losses.outputs import logits_of
from etude.losses.strategies import (
    ClassificationLoss,
    LanguageModelingLoss,
    LossStrategy,
    SegmentationLoss,
    is_encoder_decoder,
)
from etude.losses.wrapped import FunctionLoss, LossFunction, mean_squared_error


class InferredLoss(LossStrategy):
    """Chooses a strategy at the first batch and keeps it, in `chosen`.

    logits (B, C) and integer labels (B,)             classification
    logits (B, L, V), integer labels (B, L) or none   language modelling, shifted if the labels equal the inputs
    logits (B, C, H, W) and integer labels (B, H, W)  segmentation
    floating labels shaped like the output            mean squared error
    """

    def __init__(self) -> None:
        self.chosen: LossStrategy | None = None

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the chosen strategy; raise TrainingError if the shapes suggest none."""
        if self.chosen is None:
            self.chosen = infer_strategy(output, batch)
        return self.chosen.terms(output, batch, metrics=metrics)

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the counts of the chosen strategy; None before there is one."""
        return None if self.chosen is None else self.chosen.counts(batch)


def as_strategy(loss: LossStrategy | LossFunction | None) -> LossStrategy:
    """Return a strategy for a strategy, a torch loss module, any function of (predictions, labels), or None.

    >>> as_strategy(None).chosen is None
    True
    """
    if loss is None:
        return InferredLoss()
    return loss if isinstance(loss, LossStrategy) else FunctionLoss(loss)


def infer_strategy(output: Any, batch: Batch) -> LossStrategy:
    """Return the strategy that fits the output and the labels, or raise TrainingError with the choices there are."""
    logits = logits_of(output)
    labels, already_shifted = targets_of(batch)
    if logits.dim() == 3 and (already_shifted or labels is None) and _is_integer(inputs_of(batch)):
        return LanguageModelingLoss()
    if isinstance(labels, Tensor):
        shape = labels.shape
        if labels.is_floating_point():
            if shape == logits.shape:
                return mean_squared_error()
        elif logits.dim() == 2 and shape == logits.shape[:1]:
            return ClassificationLoss()
        elif logits.dim() == 3 and shape == logits.shape[:2]:
            return LanguageModelingLoss(shift=not is_encoder_decoder(output) and _repeats_inputs(labels, batch))
        elif logits.dim() == 4 and shape == logits.shape[:1] + logits.shape[2:]:
            return SegmentationLoss()
    found = f"{labels.dtype} labels {tuple(labels.shape)}" if isinstance(labels, Tensor) else "no labels"
    raise TrainingError(
        f"no loss fits an output of shape {tuple(logits.shape)} with {found}; the shapes known are: "
        f"classification, (B, C) with integers (B,); language modelling, (B, L, V) with integers (B, L) or integer "
        f"inputs; segmentation, (B, C, H, W) with integers (B, H, W); regression, floating labels of the output's "
        f"shape; for anything else name the loss"
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _repeats_inputs(labels: Tensor, batch: Batch) -> bool:
    """Whether the labels are the inputs themselves, so that the loss has to shift them.

    Labels that differ from the inputs line up with the logits as they are: next tokens prepared beforehand,
    masked tokens, classes of tokens.
    """
    inputs = inputs_of(batch)
    if not _is_integer(inputs) or inputs.shape != labels.shape:
        return False
    return bool(((labels == inputs) | (labels == IGNORE_INDEX)).all())  # waits for the device, once in a run
