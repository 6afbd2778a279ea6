"""Loss strategies: from a model's output and a batch to loss terms, one per kind of task."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import Batch
from etude.core.calling import ModelCall, inputs_of, padding_mask_of, targets_of, unwrap
from etude.core.errors import TrainingError
from etude.core.head import HeadOutput
from etude.core.terms import LossTerm, Terms
from etude.losses.functional import (
    IGNORE_INDEX,
    accuracy_term,
    count_labels,
    cross_entropy_term,
    label_weights,
    mask_labels,
    mean_of,
)
from etude.losses.fused_head import FusedHead
from etude.losses.linear import linear_cross_entropy_terms
from etude.losses.outputs import head_of, logits_of
from etude.losses.perplexity import perplexity

Smoothing = Annotated[float, Ge(0), Le(1)]


class LossStrategy(ABC):
    """Computes the terms of one kind of task. Subclass it for a task of your own."""

    @abstractmethod
    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the loss, and with `metrics` the terms of weight 0 as well."""

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model on the batch and return the output for `terms`."""
        return call(model, batch)

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:  # noqa: ARG002
        """Return the count of every weighted term from the batch alone, or None if only the model's output tells."""
        return None

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002
        """Return numbers that follow from the averages of the terms; they are reported beside these."""
        return {}

    def compute_loss(self, output: Any, batch: Batch) -> Tensor:
        """Return the loss of this batch alone, a scalar: Σ weight·sum/count.

        >>> loss = ClassificationLoss().compute_loss(torch.eye(3), (torch.zeros(3, 1), torch.arange(3)))
        >>> round(loss.item(), 4)
        0.5514
        """
        terms = self.terms(output, batch, metrics=False).values()
        return torch.stack([mean_of(term) * term.weight for term in terms]).sum()


@register("loss", "cross_entropy")
@register("loss", "text_classification")
@register("loss", "vision_classification")
class ClassificationLoss(LossStrategy):
    """Cross entropy of logits (B, …, C) with labels (B, …): class indices, or probabilities (B, …, C)."""

    def __init__(
        self,
        label_smoothing: Smoothing = 0.0,
        ignore_index: int | None = None,
        class_weights: list[float] | None = None,
    ) -> None:
        """Every label must be a class, unless `ignore_index` names the one that marks elements without a label."""
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.class_weights = None if class_weights is None else torch.as_tensor(class_weights, dtype=torch.float32)
        self._class_dim = -1

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return "loss", and "accuracy" with `metrics`."""
        logits, labels = logits_of(output), self._labels(batch)
        weights, skip, class_dim = self.class_weights, self.ignore_index, self._class_dim
        if weights is not None and weights.device != logits.device:
            weights = self.class_weights = weights.to(logits.device)  # once
        terms = {"loss": cross_entropy_term(logits, labels, None, self.label_smoothing, skip, weights, class_dim)}
        if metrics:
            add_accuracy(terms, logits, labels, skip, class_dim, weighted=weights is not None)
        return terms

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of labels that count; None for probabilities."""
        labels = self._labels(batch)
        return None if labels.is_floating_point() else {"loss": self._count(labels)}

    def _count(self, labels: Tensor) -> Tensor | float:
        if self.class_weights is not None:
            return label_weights(labels, self.class_weights, self.ignore_index).sum()
        return count_labels(labels, self.ignore_index)

    def _labels(self, batch: Batch) -> Tensor:
        return required_labels(batch, type(self).__name__)


TextClassificationLoss = ClassificationLoss
VisionClassificationLoss = ClassificationLoss


@register("loss", "segmentation")
class SegmentationLoss(ClassificationLoss):
    """Cross entropy of logits (B, C, H, W) with labels (B, H, W); pixels labelled `ignore_index` do not count."""

    def __init__(
        self,
        label_smoothing: Smoothing = 0.0,
        ignore_index: int | None = IGNORE_INDEX,
        class_weights: list[float] | None = None,
    ) -> None:
        super().__init__(label_smoothing, ignore_index, class_weights)
        self._class_dim = 1


@register("loss", "language_modeling")
class LanguageModelingLoss(LossStrategy):
    """Cross entropy of logits (B, L, V) with the next token.

    The labels are those of the batch, or its input ids where it has none. With `shift` position t predicts label
    t + 1, as labels that repeat the inputs ask for (the habit of Hugging Face); without it labels line up with the
    logits: next tokens prepared beforehand, masked tokens, classes of tokens. By default the first batch tells which:
    labels that repeat its inputs are shifted. A batch of `tokens` is set up already and is never shifted again.
    Labels equal to `ignore_index`, and those where the attention mask of the batch is 0, do not count.

    A model that returns a `HeadOutput` leaves its output layer to the loss, which never holds all logits at once. With
    `fused_head` any model is run that way: True for those with `get_output_embeddings` (Hugging Face), else the name of
    the output layer. A model that changes its logits after that layer raises TrainingError at the first batch.
    """

    def __init__(
        self,
        shift: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: Smoothing = 0.0,
        fused_head: bool | str = False,
    ) -> None:
        self.shift = shift
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.fused_head = fused_head
        self._head: FusedHead | None = None

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model, without its output layer if `fused_head` says so."""
        if self.fused_head is False:
            return call(model, batch)
        if self._head is None or self._head.model is not unwrap(model):
            self._head = FusedHead(model, self.fused_head)
        return self._head.run(call, model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return "loss"; with `metrics` "accuracy", and with label smoothing "nll", the loss without it."""
        # The mask of an encoder-decoder's batch belongs to the encoder, the labels to the decoder.
        targets, count = self._targets(batch, masked=not is_encoder_decoder(output))
        predictions = head_of(output) or logits_of(output)
        shape = predictions.shape
        if len(shape) != 3 or shape[:2] != targets.shape:
            raise TrainingError(
                f"language modelling needs logits (batch, length, vocabulary) for labels (batch, length): "
                f"found logits {tuple(shape)} and labels {tuple(targets.shape)}"
            )
        if isinstance(predictions, HeadOutput):
            terms = self._head_terms(predictions, targets, metrics)
        else:
            terms = self._logits_terms(predictions, targets, metrics)
        if count is not None:
            for term in terms.values():
                term.count = count
        return terms

    def _head_terms(self, head: HeadOutput, targets: Tensor, metrics: bool) -> Terms:
        return linear_cross_entropy_terms(
            head.hidden,
            head.weight,
            targets,
            head.bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            softcap=head.softcap,
            metrics=metrics,
        )

    def _logits_terms(self, logits: Tensor, targets: Tensor, metrics: bool) -> Terms:
        term = cross_entropy_term(logits, targets, None, self.label_smoothing, self.ignore_index)
        terms = {"loss": term}
        if metrics:
            terms["accuracy"] = accuracy_term(logits, targets, term.count, self.ignore_index)
            if self.label_smoothing:
                nll = cross_entropy_term(logits.detach(), targets, None, 0.0, self.ignore_index)
                terms["nll"] = LossTerm(nll.sum, term.count, 0.0)
        return terms

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of tokens to predict."""
        targets, count = self._targets(batch, masked=True)
        return {"loss": targets.ne(self.ignore_index).sum() if count is None else count}

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the perplexity, of the loss without label smoothing where that is known."""
        return {"perplexity": perplexity(means.get("nll", means["loss"]))}

    def _targets(self, batch: Batch, *, masked: bool) -> tuple[Tensor, int | None]:
        """Return labels that line up with the logits, and how many count if that does not depend on their values."""
        labels, already_shifted = targets_of(batch)
        own = labels is None or already_shifted
        if labels is None:
            labels = inputs_of(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 2:
            found = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise TrainingError(f"language modelling needs integer labels (batch, length), found {found}")
        labels = labels.long()
        mask = padding_mask_of(batch) if masked else None
        if mask is not None:
            labels = mask_labels(labels, mask, self.ignore_index)
        count = labels.numel()
        if not already_shifted and (self._shifts(labels, batch) if not own else self.shift is not False):
            # Move the labels, not the logits: a slice of the logits would have to be copied.
            labels = F.pad(labels[:, 1:], (0, 1), value=self.ignore_index)
            count -= labels.shape[0]
        all_count = own and mask is None and self.ignore_index < 0  # input ids are not negative
        return labels, count if all_count else None

    def _shifts(self, labels: Tensor, batch: Batch) -> bool:
        """Whether labels are to be shifted: as told, or as the first batch that has samples tells."""
        if self.shift is None and labels.numel() > 0:
            self.shift = repeats_inputs(labels, batch, self.ignore_index)
        return bool(self.shift)


@register("loss", "masked_language_modeling")
class MaskedLanguageModelingLoss(LanguageModelingLoss):
    """Cross entropy of logits (B, L, V) with the tokens that were masked: labels line up, the others are ignored.

    The options are those of `language_modeling`. Accuracy and loss count the masked positions alone.
    """

    def __init__(
        self,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: Smoothing = 0.0,
        fused_head: bool | str = False,
    ) -> None:
        super().__init__(False, ignore_index, label_smoothing, fused_head)

    def _targets(self, batch: Batch, *, masked: bool) -> tuple[Tensor, int | None]:
        labels, is_next_token = targets_of(batch)
        if labels is None or is_next_token:
            raise TrainingError(
                "masked language modelling needs labels: the token at every masked position, ignore_index elsewhere"
            )
        return super()._targets(batch, masked=masked)


def add_accuracy(
    terms: Terms, logits: Tensor, labels: Tensor, ignore_index: int | None, class_dim: int, *, weighted: bool
) -> None:
    """Add the metric "accuracy"; it counts what the loss counts, but without the weights of classes."""
    count = count_labels(labels, ignore_index) if weighted and not labels.is_floating_point() else terms["loss"].count
    terms["accuracy"] = accuracy_term(logits, labels, count, ignore_index, class_dim)


def required_labels(batch: Batch, who: str) -> Tensor:
    """Return the labels of the batch, or raise TrainingError if it has none."""
    labels = targets_of(batch)[0]
    if isinstance(labels, Tensor):
        if labels.dtype is torch.int64 or labels.is_floating_point():
            return labels
        return labels.long()  # small integers cannot even be compared with -100
    found = "none" if labels is None else f"a {type(labels).__name__}"
    raise TrainingError(
        f"{who} needs a tensor of labels, the batch has {found}: give (input, labels) or a mapping with 'labels'"
    )


def repeats_inputs(labels: Tensor, batch: Batch, ignore_index: int = IGNORE_INDEX) -> bool:
    """Whether the labels are the inputs themselves, so that the loss has to shift them. Waits for the device.

    >>> ids = torch.tensor([[5, 6, 7]])
    >>> repeats_inputs(ids, {"input_ids": ids}), repeats_inputs(torch.tensor([[6, 7, -100]]), {"input_ids": ids})
    (True, False)
    """
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor) or inputs.is_floating_point() or inputs.shape != labels.shape:
        return False
    return bool(((labels == inputs) | (labels == ignore_index)).all())


def is_encoder_decoder(output: Any) -> bool:
    """Whether the output is that of a Hugging Face encoder-decoder."""
    return isinstance(output, Mapping) and "encoder_last_hidden_state" in output
