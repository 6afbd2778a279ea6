"""Loss strategies: from a model's output and a batch to loss terms, one per kind of task.

`logits_of` finds the logits in whatever a model returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import Batch, targets_of
from etude.core.errors import TrainingError
from etude.core.model import HeadOutput, ModelCall
from etude.core.task import Terms, settings_of
from etude.losses.functional import IGNORE_INDEX, accuracy_term, count_labels, cross_entropy_term, mean_of

Smoothing = Annotated[float, Ge(0), Le(1)]
LOGITS_KEYS = ("logits", "output", "out", "prediction", "predictions")
"""Keys that may hold the logits of a mapping; the first one present is used."""


class LossStrategy(ABC):
    """Computes the terms of one kind of task. Subclass it for your own task."""

    @abstractmethod
    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return the terms of the loss, and with `metrics` the terms of weight 0 as well."""

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model on the batch and return the output for `terms`."""
        return call(model, batch)

    def outputs(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the whole model on the batch, as for counting FLOPs."""
        return call(model, batch)

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:  # noqa: ARG002
        """Return the count of every weighted term from the batch alone, or None if it depends on the output."""
        return None

    def has_cheap_metrics(self, output: Any, batch: Batch) -> bool:  # noqa: ARG002
        """Return whether the terms of weight 0 are cheap enough to be computed in training too."""
        return True

    def constants(self) -> Hashable:
        """Return the host-side values the terms depend on: they are constants of a captured step."""
        return settings_of(self)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002
        """Return metrics derived from the averages of the terms; they are reported beside these."""
        return {}

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:  # noqa: ARG002
        """Return the mean cross entropy in nats per label from the averages; None if they do not contain it."""
        return None

    def announcement(self) -> str | None:
        """Return a sentence about what it decided in this run, which is shown to the user; None before that."""
        return ""

    def decisions(self) -> dict[str, Any]:
        """Return decisions of the first batches as plain data; a resumed run restores them with `decide`."""
        return {}

    def decide(self, decisions: Mapping[str, Any]) -> None:  # noqa: B027
        """Replace all decisions by those that `decisions` returned."""

    def facts(self) -> Mapping[str, Any]:
        """Return plain data about the loss that checkpoints keep beside the weights."""
        return {}

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:  # noqa: B027
        """Raise CheckpointError if the stored data of the checkpoint at `place` contradicts this loss."""

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predictions and aligned labels, -100 where there is none, as input of metrics."""
        logits, labels = logits_of(output), required_labels(batch, "a metric")
        return logits.squeeze(-1) if logits.shape == (*labels.shape, 1) else logits, labels

    def compute_loss(self, output: Any, batch: Batch) -> Tensor:
        """Return the loss of only this batch, a scalar: Σ weight·sum/count.

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
        """Every label must be a class, unless it is `ignore_index`, which marks elements without a label."""
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.class_weights = None if class_weights is None else torch.as_tensor(class_weights, dtype=torch.float32)
        self._class_dim = -1

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return "loss", and "accuracy" with `metrics`."""
        logits, labels = logits_of(output), self._labels(batch)
        weights, skip, class_dim = self.class_weights, self.ignore_index, self._class_dim
        if weights is not None and weights.device != logits.device:
            weights = self.class_weights = weights.to(logits.device)  # only the first batch is checked
        terms = {"loss": cross_entropy_term(logits, labels, None, self.label_smoothing, skip, weights, class_dim)}
        if metrics:
            add_accuracy(terms, logits, labels, skip, class_dim, weighted=weights is not None)
        return terms

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of labels that count; None for probabilities."""
        labels = self._labels(batch)
        if labels.is_floating_point():
            return None
        return {"loss": count_labels(labels, self.ignore_index, self.class_weights)}

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits and labels; ignored labels are -100, and probabilities become the likeliest class."""
        logits, labels = super().judged(output, batch)
        return logits, class_labels(logits, labels, self.ignore_index, self._class_dim)

    def cross_entropy(self, means: Mapping[str, float]) -> float | None:
        """Return the loss, unless label smoothing or class weights change it."""
        return None if self.label_smoothing or self.class_weights is not None else means.get("loss")

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


def logits_of(output: Any) -> Tensor:
    """Return the logits (or predictions) of a model's output.

    Accepts a tensor, a tuple such as `(logits,)`, `(logits, loss, …)` or `(loss, logits, …)`, a mapping with `logits`
    (a Hugging Face `ModelOutput` is one), and any object with an attribute `logits`. Raises TrainingError otherwise.
    The logits of a `HeadOutput` are computed.

    >>> import torch
    >>> logits_of((torch.ones(2, 3), torch.tensor(0.5))).shape
    torch.Size([2, 3])
    """
    found = _find(output)
    if isinstance(found, Tensor):
        return found
    if isinstance(found, HeadOutput):
        return found.logits
    if isinstance(output, Mapping):
        what = f"a mapping with the keys {', '.join(map(str, output)) or 'none'}"
    else:
        what = f"a {type(output).__name__}"
    raise TrainingError(
        f"no logits in the model's output, {what}: return a tensor, (logits, …), a mapping with 'logits' "
        f"or an object with .logits, or pass a LossStrategy that reads this output"
    )


def head_of(output: Any) -> HeadOutput | None:
    """Return the `HeadOutput` in place of the logits in a model's output, or None if there is none."""
    found = _find(output)
    return found if isinstance(found, HeadOutput) else None


def shape_of(output: Any) -> torch.Size:
    """Return the shape of the logits without computing those of a `HeadOutput`; raises like `logits_of`."""
    head = head_of(output)
    return head.shape if head is not None else logits_of(output).shape


def _find(output: Any) -> Any:
    """Return the object in place of the logits, or None."""
    if isinstance(output, (Tensor, HeadOutput)):
        return output
    if isinstance(output, Mapping):
        return next((output[key] for key in LOGITS_KEYS if key in output), None)
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)):
        # A scalar among the outputs is a loss that the model computed itself.
        several = (Tensor, HeadOutput)
        found = next((item for item in output if isinstance(item, several) and len(item.shape) > 0), None)
    return found


def add_accuracy(
    terms: Terms, logits: Tensor, labels: Tensor, ignore_index: int | None, class_dim: int, *, weighted: bool
) -> None:
    """Add the metric "accuracy"; it counts the same elements as the loss, without class weights."""
    count = count_labels(labels, ignore_index) if weighted and not labels.is_floating_point() else terms["loss"].count
    terms["accuracy"] = accuracy_term(logits, labels, count, ignore_index, class_dim)


def class_labels(logits: Tensor, labels: Tensor, ignore_index: int | None, class_dim: int) -> Tensor:
    """Return labels as metrics take them: -100 where they are ignored, and the likeliest class of probabilities."""
    if labels.is_floating_point() and labels.shape == logits.shape:
        return labels.argmax(class_dim)
    if ignore_index in (None, IGNORE_INDEX):
        return labels
    return labels.masked_fill(labels == ignore_index, IGNORE_INDEX)


def required_labels(batch: Batch, who: str) -> Tensor:
    """Return the labels of the batch, or raise TrainingError if it has none."""
    labels = targets_of(batch)[0]
    if isinstance(labels, Tensor):
        if labels.dtype is torch.int64 or labels.is_floating_point():
            return labels
        return labels.long()  # small integer dtypes cannot represent -100
    found = "none" if labels is None else f"a {type(labels).__name__}"
    raise TrainingError(
        f"{who} needs a tensor of labels, the batch has {found} (it is a {type(batch).__name__}); pass (input, "
        "labels), a mapping with 'labels', an object with .y or .labels, or a loss function of (output, batch) "
        "whose second argument is named `batch`"
    )
