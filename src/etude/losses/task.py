"""The supervised task: a model, a batch of any form and a loss, which is chosen by shapes by default."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from etude.core.batch import Batch, inputs_of, targets_of
from etude.core.errors import CheckpointError, TrainingError
from etude.core.lookups import explain_lookup
from etude.core.model import ModelCall
from etude.core.task import Task, Terms
from etude.losses.language import LanguageModelingLoss, is_encoder_decoder, shift_in
from etude.losses.strategies import ClassificationLoss, LossStrategy, SegmentationLoss, shape_of
from etude.losses.wrapped import FunctionLoss, LossFunction, mean_squared_error

KINDS: Mapping[str, Callable[[int | None], LossStrategy]] = {
    "classification": lambda ignore_index: ClassificationLoss(ignore_index=ignore_index),
    "language_modeling": lambda _: LanguageModelingLoss(),
    "segmentation": lambda _: SegmentationLoss(),
    "mse": lambda _: mean_squared_error(),
}
"""The strategies that can be chosen, by their names in checkpoints."""


class InferredLoss(LossStrategy):
    """Chooses a strategy at the first batch and keeps it, in `chosen`.

    logits (B, C) and integer labels (B,)             classification
    logits (B, L, V), integer labels (B, L) or none   language modelling, shifted if the labels equal the inputs
    logits (B, C, H, W) and integer labels (B, H, W)  segmentation
    floating labels shaped like the output            mean squared error
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        """`ignore_index` is the class label of samples without a label, if there are any."""
        self.chosen: LossStrategy | None = None
        self._ignore_index = ignore_index

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the chosen strategy; raise TrainingError if the shapes suggest none."""
        return self._choose(output, batch).terms(output, batch, metrics=metrics)

    def has_cheap_metrics(self, output: Any, batch: Batch) -> bool:
        """Return the value of the chosen strategy."""
        return self._choose(output, batch).has_cheap_metrics(output, batch)

    def constants(self) -> Hashable:
        """Return the value of the chosen strategy."""
        return () if self.chosen is None else self.chosen.constants()

    def _choose(self, output: Any, batch: Batch) -> LossStrategy:
        if self.chosen is None:
            self.chosen = infer_strategy(output, batch, self._ignore_index)
        return self.chosen

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the counts of the chosen strategy; None before the choice."""
        return None if self.chosen is None else self.chosen.counts(batch)

    def decisions(self) -> dict[str, Any]:
        """Return the kind of the chosen strategy, and whether a language model's labels are shifted."""
        kind = next((name for name, one in KINDS.items() if type(self.chosen) is type(one(None))), None)
        if kind is None:
            return {}
        shift = {"shift": self.chosen.shift} if isinstance(self.chosen, LanguageModelingLoss) else {}
        return {"kind": kind, **shift}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore the saved choice, if there is one."""
        kind = decisions.get("kind")
        if kind is not None and kind not in KINDS:
            raise CheckpointError(f"kind: found {kind!r:.60}, expected one of {', '.join(KINDS)}")
        self.chosen = None if kind is None else KINDS[kind](self._ignore_index)
        if isinstance(self.chosen, LanguageModelingLoss):
            self.chosen.shift = shift_in(decisions)

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the metric inputs of the chosen strategy."""
        return super().judged(output, batch) if self.chosen is None else self.chosen.judged(output, batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that the chosen strategy derives."""
        return {} if self.chosen is None else self.chosen.derived(means)

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:
        """Return the value of the chosen strategy."""
        return None if self.chosen is None else self.chosen.cross_entropy(means)


def as_strategy(loss: LossStrategy | LossFunction | None) -> LossStrategy:
    """Return a strategy for a strategy, a torch loss module, any function of (predictions, labels), or None.

    >>> as_strategy(None).chosen is None
    True
    """
    if loss is None:
        return InferredLoss()
    return loss if isinstance(loss, LossStrategy) else FunctionLoss(loss)


def infer_strategy(output: Any, batch: Batch, ignore_index: int | None = None) -> LossStrategy:
    """Return the strategy that fits the output and the labels, or raise TrainingError with the available ones."""
    size = shape_of(output)
    labels, already_shifted = targets_of(batch)
    if len(size) == 3 and (already_shifted or labels is None) and _is_integer(inputs_of(batch)):
        return LanguageModelingLoss(shift=True)
    if isinstance(labels, Tensor):
        shape = labels.shape
        if labels.is_floating_point():
            if shape == size:
                return mean_squared_error()
        elif len(size) == 2 and shape == size[:1]:
            return ClassificationLoss(ignore_index=ignore_index)
        elif len(size) == 3 and shape == size[:2]:
            return LanguageModelingLoss(shift=False if is_encoder_decoder(output) else None)
        elif len(size) == 4 and shape == size[:1] + size[2:]:
            return SegmentationLoss()
    found = f"{labels.dtype} labels {tuple(labels.shape)}" if isinstance(labels, Tensor) else "no labels"
    raise TrainingError(
        f"no loss fits an output of shape {tuple(size)} with {found}; supported are: classification, (B, C) with "
        "integers (B,); language modelling, (B, L, V) with integers (B, L) or integer inputs; segmentation, (B, C, "
        "H, W) with integers (B, H, W); regression, floating-point labels of the output's shape; otherwise set the "
        "loss"
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


class SupervisedTask(Task):
    """Turns a model and a batch of any form into the terms of a loss strategy.

    `loss` is anything `as_strategy` accepts: a strategy, a torch loss, a function, or None to choose by shapes.

    >>> import torch
    >>> task = SupervisedTask(nn.CrossEntropyLoss())
    >>> terms = task(nn.Linear(4, 3), (torch.zeros(2, 4), torch.tensor([0, 2])), metrics=True)
    >>> sorted(terms), int(terms["loss"].count)
    (['accuracy', 'loss'], 2)
    """

    chooses_metrics = True

    def __init__(self, loss: LossStrategy | LossFunction | None = None) -> None:
        self.strategy = as_strategy(loss)
        self._model: nn.Module | None = None
        self._call: ModelCall | None = None

    def __call__(self, model: nn.Module, batch: Batch, *, metrics: bool | None) -> Terms:
        """Run the model on the batch and return its terms; raise DataError for ids beyond an embedding."""
        if self._call is None or model is not self._model:
            self._model, self._call = model, ModelCall(model)
        try:
            output = self.strategy.run(self._call, model, batch)
        except IndexError as error:
            if (explained := explain_lookup(error, model)) is None:
                raise
            raise explained from error
        if metrics is None:
            metrics = self.strategy.has_cheap_metrics(output, batch)
        return self.strategy.terms(output, batch, metrics=metrics)

    def constants(self) -> Hashable:
        """Return the host-side values of the loss."""
        return self.strategy.constants()

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that the strategy derives from averages."""
        return self.strategy.derived(means)

    def decisions(self) -> dict[str, Any]:
        """Return the decisions of the strategy."""
        return self.strategy.decisions()

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore the decisions of the strategy."""
        self.strategy.decide(decisions)

    def facts(self) -> Mapping[str, Any]:
        """Return the strategy's data for checkpoints."""
        return self.strategy.facts()

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if the stored data of the checkpoint at `place` contradicts the strategy."""
        self.strategy.check_facts(saved, place)

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the count of every weighted term from the batch alone, or None if the strategy cannot know it."""
        return self.strategy.counts(batch)
