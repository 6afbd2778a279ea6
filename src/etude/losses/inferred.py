"""The loss that is used if none is given: chosen on the first batch by shapes, labels and the model's own loss."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.batch import Batch, inputs_of, targets_of
from etude.core.errors import CheckpointError, TrainingError
from etude.core.label_range import LabelRange
from etude.core.model import ModelCall, unwrap
from etude.core.spelling import shorten
from etude.core.task import Terms
from etude.losses.binary import MultiLabelLoss
from etude.losses.language import LanguageModelingLoss, are_next_tokens, is_encoder_decoder, shift_in
from etude.losses.own import ModelLoss
from etude.losses.own_mean import own_loss, problem_type, trying
from etude.losses.strategies import ClassificationLoss, LossStrategy, SegmentationLoss, shape_of
from etude.losses.wrapped import mean_squared_error

KINDS: Mapping[str, Callable[[int | None], LossStrategy]] = {
    "classification": lambda ignore_index: ClassificationLoss(ignore_index=ignore_index),
    "language_modeling": lambda _: LanguageModelingLoss(),
    "segmentation": lambda _: SegmentationLoss(),
    "mse": lambda _: mean_squared_error(),
    "multi_label": lambda _: MultiLabelLoss(),
    "model": lambda _: ModelLoss(),
}
"""The strategies that can be chosen, by their names in checkpoints."""
WORDS = {
    "classification": "cross entropy",
    "language_modeling": "cross entropy of tokens",
    "segmentation": "cross entropy of pixels",
    "mse": "mean squared error",
    "multi_label": "binary cross entropy of several labels",
    "model": "the model's own",
}
TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-5}
"""Relative differences between two losses that count as rounding; `HALF_TOLERANCE` for half precision."""
HALF_TOLERANCE = 2e-2
SUM_TOLERANCE = 1e-3
"""Probabilities of classes sum to 1 up to this difference."""
NO_PROBABILITIES = (
    "the labels of the first batch were probabilities of classes, but now the labels of a sample sum to {found}; "
    "set the loss: multi_label if a sample may have several classes or none"
)


class InferredLoss(LossStrategy):
    """Chooses a strategy at the first batch and keeps it, in `chosen`.

    logits (B, C) and integer labels (B,)             classification
    logits (B, C) and probabilities (B, C)            classification
    logits (B, C) and labels (B, C) of 0 and 1        binary cross entropy
    logits (B, L, V), integer labels (B, L) or none   language modelling, shifted if the labels equal the inputs
    logits (B, C, H, W) and integer labels (B, H, W)  segmentation
    floating labels shaped like the output            mean squared error

    If the model computes a loss itself, as those of Hugging Face do, the choice must give the same value on the first
    batch, padding aside. Otherwise the model's own loss is used.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        """`ignore_index` is the class label of samples without a label, if there are any."""
        self.chosen: LossStrategy | None = None
        self._ignore_index = ignore_index
        self._for_now: LossStrategy | None = None
        """The strategy of a batch that did not decide."""
        self._has_own: bool | None = None
        """Whether the model computes a loss; None until a batch has shown it."""
        self._why = self._problem = ""
        self._sums = LabelRange()
        """The sums of the labels of every sample, which were probabilities in the first batch."""

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model as the chosen strategy does; compare with the model's own loss before."""
        if self.chosen is None and self._has_own is not False and call.takes_labels(batch):
            self._compare(call, model, batch)
        if (strategy := self.chosen or self._for_now) is not None:
            return strategy.run(call, model, batch)
        output = call(model, batch)
        if self.chosen is None and own_loss(output) is not None:
            self._compare(call, model, batch)
        return output

    def outputs(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model as the chosen strategy does."""
        return call(model, batch) if self.chosen is None else self.chosen.outputs(call, model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the chosen strategy; raise TrainingError if the shapes suggest none.

        Raises DataError if labels that were probabilities in the first batch are none in this one (on a GPU it is
        raised with the numbers of a log point, since the check must not synchronise).
        """
        strategy = self._choose(output, batch)
        terms = strategy.terms(output, batch, metrics=metrics)
        if _has_probabilities(strategy, batch) and not torch.compiler.is_compiling():
            labels = targets_of(batch)[0]
            if labels.is_cpu or torch.is_grad_enabled():
                self._sums.add(labels.sum(-1), 0.5, 1.5, NO_PROBABILITIES)  # half precision rounds the sums
        return terms

    def has_cheap_metrics(self, output: Any, batch: Batch) -> bool:
        """Return the value of the chosen strategy."""
        return self._choose(output, batch).has_cheap_metrics(output, batch)

    def constants(self) -> Hashable:
        """Return the value of the chosen strategy."""
        return () if self.chosen is None else self.chosen.constants()

    def _choose(self, output: Any, batch: Batch) -> LossStrategy:
        if self.chosen is None and self._for_now is not None:
            return self._for_now
        if self.chosen is None:
            found = infer_strategy(output, batch, self._ignore_index, self._problem)
            if _shows_nothing(targets_of(batch)[0]):
                return found
            self.chosen = found
            self._why = f"because of {_labels_in_words(self.chosen, batch)} and outputs {tuple(shape_of(output))}"
        return self.chosen

    def _compare(self, call: ModelCall, model: nn.Module, batch: Batch) -> None:
        """Choose a strategy that gives the model's own loss, or else that one. Synchronises with the device."""
        try:
            own, ours = both_losses(call, unwrap(model), batch, self._ignore_index)
        except Exception as error:  # the model's own code: it does not take these labels
            self._problem = f"; the model's own loss fails with {type(error).__name__}: {shorten(str(error), 200)}"
            own = None
        self._has_own = own is not None
        if own is None:
            return
        tolerance = TOLERANCES.get(own.dtype, HALF_TOLERANCE) * own.abs().clamp_min(1e-3)
        equal = [one for one, value in ours if bool((value - own).abs() <= tolerance)]
        if not own.isfinite():  # a batch without labels shows nothing
            self._for_now = ours[0][0] if ours else ModelLoss()
        elif len(equal) == 1 and getattr(equal[0], "shift", False) and are_next_tokens(targets_of(batch)[0], batch):
            self.chosen = LanguageModelingLoss(shift=False)
            self._why = "without the shift of the model's own, because the labels are the next tokens already"
        elif len(equal) == 1:
            self.chosen, self._why = equal[0], "which equals the model's own"
        elif equal:
            self._for_now = equal[0]
        elif ours and _has_probabilities(ours[0][0], batch) and problem_type(unwrap(model)) is None:
            self.chosen = ours[0][0]
            self._why = (
                f"because of {_labels_in_words(self.chosen, batch)}; the model's own would be {float(own):.4f}"
            )
        else:
            values = ", ".join(f"{WORDS[_name_of(one)]} would be {float(value):.4f}" for one, value in ours[:1])
            self.chosen = chosen = ModelLoss()
            chosen.find_out(call, model, batch)
            mean = "" if chosen.mean is None else f"{chosen.mean.text}, "
            self._why = (
                f"{mean}{float(own):.4f} on the first batch; {values or 'no other fits its output and labels'}"
            )

    def announcement(self) -> str | None:
        """Return which loss was chosen and why."""
        if self.chosen is None or self.chosen.announcement() is None:
            return None
        return f"loss: {WORDS[_name_of(self.chosen)]}, {self._why}" if self._why else ""

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the counts of the chosen strategy; None before the choice."""
        return None if self.chosen is None else self.chosen.counts(batch)

    def decisions(self) -> dict[str, Any]:
        """Return the kind of the chosen strategy, and whether a language model's labels are shifted."""
        if self.chosen is None:
            return {}
        shift = {"shift": self.chosen.shift} if isinstance(self.chosen, LanguageModelingLoss) else {}
        return {"kind": _name_of(self.chosen), **self.chosen.decisions(), **shift}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore the saved choice, if there is one."""
        kind = decisions.get("kind")
        if kind is not None and kind not in KINDS:
            raise CheckpointError(f"kind: found {kind!r:.60}, expected one of {', '.join(KINDS)}")
        self._for_now, self._has_own, self._why = None, None, ""
        self.chosen = None if kind is None else KINDS[kind](self._ignore_index)
        if isinstance(self.chosen, ModelLoss):
            self.chosen.decide(decisions)
        if isinstance(self.chosen, LanguageModelingLoss):
            self.chosen.shift = shift_in(decisions)

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the metric inputs of the chosen strategy."""
        return super().judged(output, batch) if self.chosen is None else self.chosen.judged(output, batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that the chosen strategy derives."""
        self._sums.check()
        return {} if self.chosen is None else self.chosen.derived(means)

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:
        """Return the value of the chosen strategy."""
        return None if self.chosen is None else self.chosen.cross_entropy(means)


def infer_strategy(output: Any, batch: Batch, ignore_index: int | None = None, problem: str = "") -> LossStrategy:
    """Return the strategy that fits the output and the labels, or raise TrainingError with the available ones.

    `problem` is added to the error.
    """
    if found := fitting_strategies(output, batch, ignore_index):
        return found[0]
    labels = targets_of(batch)[0]
    found_labels = f"{labels.dtype} labels {tuple(labels.shape)}" if isinstance(labels, Tensor) else "no labels"
    raise TrainingError(
        f"no loss fits an output of shape {tuple(shape_of(output))} with {found_labels}; supported are: "
        "classification, (B, C) with integers (B,) or probabilities (B, C); several labels, (B, C) with 0 and 1; "
        "language modelling, (B, L, V) with integers (B, L) or integer inputs; segmentation, (B, C, H, W) with "
        "integers (B, H, W); regression, floating-point labels of the output's shape; otherwise set the loss, such as "
        "binary_cross_entropy for one logit per sample"
        f"{problem}"
    )


def fitting_strategies(output: Any, batch: Batch, ignore_index: int | None = None) -> list[LossStrategy]:
    """Return the strategies that fit the shapes of output and labels, the likeliest first."""
    size = shape_of(output)
    labels, already_shifted = targets_of(batch)
    inputs = inputs_of(batch)
    reads_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point()
    if len(size) == 3 and (already_shifted or labels is None) and reads_tokens:
        return [LanguageModelingLoss(shift=True)]
    if not isinstance(labels, Tensor):
        return []
    shape = labels.shape
    if shape == size and (labels.is_floating_point() or len(size) == 2):
        return _of_equal_shapes(labels, batch, ignore_index)
    if labels.is_floating_point():
        return []
    if len(size) in (2, 4) and size[1] == 1:
        return []  # the cross entropy of a single class is 0
    if len(size) == 2 and shape == size[:1]:
        return [ClassificationLoss(ignore_index=ignore_index)]
    if len(size) == 3 and shape == size[:2]:
        if is_encoder_decoder(output):
            return [LanguageModelingLoss(shift=False)]
        return [LanguageModelingLoss()]
    if len(size) == 4 and shape == size[:1] + size[2:]:
        return [SegmentationLoss()]
    return []


def _of_equal_shapes(labels: Tensor, batch: Batch, ignore_index: int | None) -> list[LossStrategy]:
    """Return the strategies for one label per output, by the values of the first batch. Synchronises."""
    inputs = inputs_of(batch)
    regression = [mean_squared_error()] if labels.is_floating_point() else []
    if labels.dim() != 2 or labels.shape[1] < 2 or (isinstance(inputs, Tensor) and inputs.shape == labels.shape):
        return [*regression]  # the last case: inputs that are reproduced
    found: list[LossStrategy] = []
    values = labels.float()
    in_range = bool(((values >= 0) & (values <= 1)).all())
    if in_range and labels.is_floating_point() and bool((values.sum(1) - 1).abs().max() < SUM_TOLERANCE):
        found.append(ClassificationLoss(ignore_index=ignore_index))
    if in_range and bool(((values == 0) | (values == 1)).all()) and (not regression or bool(values.any())):
        found.append(MultiLabelLoss())
    return [*found, *regression]


def both_losses(
    call: ModelCall, model: nn.Module, batch: Batch, ignore_index: int | None
) -> tuple[Tensor | None, list[tuple[LossStrategy, Tensor]]]:
    """Return the model's own loss of a batch, None if it has none, and the losses that fit its output.

    Positions of padding count here, as in the models' own losses; in training they never do.
    """
    with trying(model):
        own = own_loss(call.with_labels(model, batch))
    if own is None:
        return None, []
    try:
        with trying(model):
            output = call(model, batch)
        found = fitting_strategies(output, batch, ignore_index)
        if type(found[0]) is LanguageModelingLoss and found[0].shift is None:
            found = [LanguageModelingLoss(shift=True), LanguageModelingLoss(shift=False)]
        masks = ("attention_mask", "attn_mask")
        whole = {k: v for k, v in batch.items() if k not in masks} if isinstance(batch, Mapping) else batch
        with torch.no_grad():
            return own, [(one, one.compute_loss(output, whole)) for one in found]
    except Exception:  # without labels it returns something else
        return own, []


def _name_of(strategy: LossStrategy) -> str:
    return next(name for name, make in KINDS.items() if type(strategy) is type(make(None)))


def _has_probabilities(chosen: LossStrategy, batch: Batch) -> bool:
    return isinstance(chosen, ClassificationLoss) and bool(targets_of(batch)[0].is_floating_point())


def _labels_in_words(chosen: LossStrategy, batch: Batch) -> str:
    labels = targets_of(batch)[0]
    if not isinstance(labels, Tensor):
        return "no labels"
    kind = "floating-point labels" if labels.is_floating_point() else "integer labels"
    if isinstance(chosen, MultiLabelLoss):
        kind = "labels of 0 and 1"
    elif _has_probabilities(chosen, batch):
        kind = "labels whose rows sum to 1"
    return f"{kind} {tuple(labels.shape)}"


def _shows_nothing(labels: Any) -> bool:
    """Return whether all labels of several outputs are 0: they may be several labels, or numbers. Synchronises."""
    is_open = isinstance(labels, Tensor) and labels.is_floating_point() and labels.dim() == 2 and labels.shape[1] > 1
    return is_open and not bool(labels.any())
