"""Language modelling: cross entropy with the next token, or with masked tokens."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import Batch, inputs_of, padding_mask_of, targets_of
from etude.core.errors import CheckpointError, TrainingError
from etude.core.model import HeadOutput, ModelCall, unwrap
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX, accuracy_term, cross_entropy_term, mask_labels, perplexity
from etude.losses.fused_head import FusedHead
from etude.losses.linear import linear_cross_entropy_terms
from etude.losses.strategies import LossStrategy, Smoothing, head_of, logits_of


@register("loss", "language_modeling")
class LanguageModelingLoss(LossStrategy):
    """Cross entropy of logits (B, L, V) with the next token.

    The labels are those of the batch, or its input ids if it has none. With `shift` position t predicts label t + 1,
    for labels that equal the inputs (the Hugging Face convention). Without it labels are aligned with the logits:
    already shifted tokens, masked tokens, token classes. By default the first conclusive batch decides: labels that
    equal its inputs are shifted. A batch of `tokens` is already aligned. Labels equal to `ignore_index`, and those
    where the attention mask of the batch is 0, do not count.

    A model that returns a `HeadOutput` leaves its output layer to the loss, which never materialises all logits. With
    `fused_head` any model is run that way: True for those with `get_output_embeddings` (Hugging Face), else the name
    of the output layer. A model that changes its logits after that layer raises TrainingError at the first batch.
    """

    def __init__(
        self,
        shift: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: Smoothing = 0.0,
        fused_head: bool | str = False,
    ) -> None:
        self.shift = shift
        self._finds_shift = shift is None
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.fused_head = fused_head
        self._head: FusedHead | None = None

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model, without its output layer if `fused_head` is set."""
        if self.fused_head is False:
            return call(model, batch)
        if self._head is None or self._head.model is not unwrap(model):
            self._head = FusedHead(model, self.fused_head)
        return self._head.run(call, model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return "loss"; with `metrics` "accuracy", and with label smoothing "nll", the loss without it."""
        # The mask of an encoder-decoder batch belongs to the encoder, the labels to the decoder.
        targets, count = self._targets(batch, masked=not is_encoder_decoder(output))
        return self._token_terms(token_predictions(output, targets), targets, count, metrics)

    def _token_terms(
        self, predictions: HeadOutput | Tensor, targets: Tensor, count: int | None, metrics: bool
    ) -> Terms:
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

    def has_cheap_metrics(self, output: Any, batch: Batch) -> bool:  # noqa: ARG002
        """Return whether the loss is computed from hidden states: then accuracy comes from the same pass."""
        return head_of(output) is not None

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of tokens to predict."""
        targets, count = self._targets(batch, masked=True)
        return {"loss": targets.ne(self.ignore_index).sum() if count is None else count}

    def decisions(self) -> dict[str, Any]:
        """Return whether labels are shifted, if a batch has decided it."""
        return {"shift": self.shift} if self._finds_shift and self.shift is not None else {}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore whether labels are shifted, unless it is set explicitly."""
        if self._finds_shift:
            self.shift = shift_in(decisions)

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return all logits, and the tokens that they should predict."""
        targets, _ = self._targets(batch, masked=not is_encoder_decoder(output))
        return logits_of(output), targets.masked_fill(targets == self.ignore_index, IGNORE_INDEX)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the perplexity; empty if only the loss with label smoothing is known."""
        nats = self.cross_entropy(means)
        return {} if nats is None else {"perplexity": perplexity(nats)}

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:
        """Return the loss without label smoothing, if known."""
        return means.get("nll", None if self.label_smoothing else means.get("loss"))

    def _targets(self, batch: Batch, *, masked: bool) -> tuple[Tensor, int | None]:
        """Return labels aligned with the logits, and their count if it does not depend on their values."""
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
            # Shift the labels, not the logits: a slice of the logits would have to be copied.
            labels = F.pad(labels[:, 1:], (0, 1), value=self.ignore_index)
            count -= labels.shape[0]
        all_count = own and mask is None and self.ignore_index < 0  # input ids are not negative
        return labels, count if all_count else None

    def _shifts(self, labels: Tensor, batch: Batch) -> bool:
        """Whether labels are shifted: as set, or as the first conclusive batch decides."""
        if self.shift is None:
            self.shift = repeats_inputs(labels, batch, self.ignore_index)
        return bool(self.shift)


@register("loss", "masked_language_modeling")
class MaskedLanguageModelingLoss(LanguageModelingLoss):
    """Cross entropy of logits (B, L, V) with masked tokens: labels are aligned, and other positions are ignored.

    The options are those of `language_modeling`. Accuracy and loss count only masked positions.
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


def repeats_inputs(labels: Tensor, batch: Batch, ignore_index: int = IGNORE_INDEX) -> bool | None:
    """Whether the labels equal the inputs, so that the loss must shift them. Synchronises with the device.

    None if this batch is inconclusive: it has no labels, or they equal both the inputs and the next tokens, as in a
    sequence of equal tokens.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> repeats_inputs(ids, {"input_ids": ids}), repeats_inputs(torch.tensor([[6, 7, -100]]), {"input_ids": ids})
    (True, False)
    >>> repeats_inputs(torch.tensor([[-100, -100, -100]]), {"input_ids": ids}) is None
    True
    """
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor) or inputs.is_floating_point() or inputs.shape != labels.shape:
        return False
    counted = labels != ignore_index
    others = (counted & (labels != inputs)).any()
    not_next = (counted[:, :-1] & (labels[:, :-1] != inputs[:, 1:])).any()
    if bool(others):
        return False
    return True if bool(not_next) else None


def are_next_tokens(labels: Any, batch: Batch) -> bool:
    """Whether every label is the next token of the inputs already. Synchronises with the device.

    >>> import torch
    >>> are_next_tokens(torch.tensor([[6, 7, -100]]), {"input_ids": torch.tensor([[5, 6, 7]])})
    True
    """
    inputs = inputs_of(batch)
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor) or inputs.shape != labels.shape:
        return False
    counted, same = labels[:, :-1] != IGNORE_INDEX, labels[:, :-1] == inputs[:, 1:]
    return bool(counted.any()) and bool((same | ~counted).all()) and repeats_inputs(labels, batch) is False


def shift_in(decisions: Mapping[str, Any]) -> bool | None:
    """Return the saved decision about the shift; raise CheckpointError if it is neither true nor false."""
    shift = decisions.get("shift")
    if shift is not None and not isinstance(shift, bool):
        raise CheckpointError(f"shift: found {shift!r:.60}, expected true or false")
    return shift


def token_predictions(output: Any, targets: Tensor) -> HeadOutput | Tensor:
    """Return the logits, or a `HeadOutput`; raise TrainingError unless they are aligned with the targets."""
    predictions = head_of(output) or logits_of(output)
    shape = predictions.shape
    if len(shape) != 3 or shape[:2] != targets.shape:
        raise TrainingError(
            f"predicting tokens needs logits (batch, length, vocabulary) for labels (batch, length): "
            f"found logits {tuple(shape)} and labels {tuple(targets.shape)}"
        )
    return predictions


def is_encoder_decoder(output: Any) -> bool:
    """Whether the output is that of a Hugging Face encoder-decoder."""
    return isinstance(output, Mapping) and "encoder_last_hidden_state" in output
