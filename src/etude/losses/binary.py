"""Binary and multi-label cross entropy on logits, as sums and counts.

A missing label (NaN, `ignore_index`, or a mask of 0) does not count.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.batch import Batch
from etude.core.errors import TrainingError
from etude.core.label_range import LabelRange
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX, averaged
from etude.losses.strategies import LossStrategy, logits_of, required_labels

Weight = Annotated[float, Ge(0)]
OUT_OF_RANGE = (
    "binary labels are 0 and 1 or probabilities between them, found {found}: map the labels to 0 and 1, and mark "
    "missing ones by NaN or ignore_index"
)


def binary_cross_entropy_term(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    pos_weight: Tensor | float | None = None,
    ignore_index: int | None = IGNORE_INDEX,
) -> LossTerm:
    """Return the sum of −log p(target), p = sigmoid(logits), and the number of labels that count.

    `targets` are 0 and 1 or probabilities, shaped like `logits`; logits (…, 1) also fit targets (…). `mask` is shaped
    like the targets: labels where it is 0 do not count, and a floating-point mask weights the others in the sum and
    in the count. `pos_weight` multiplies the loss of positive labels and, as in torch, does not change the count.
    With `ignore_index=None` no label may be missing, and without a mask the count is a plain number. Half-precision
    logits are computed in float32. Raises TrainingError for shapes that do not fit and DataError for labels outside 0
    … 1 (not on a GPU, where the check would synchronise).

    >>> round(binary_cross_entropy(torch.tensor([2.0, -1.0, 5.0]), torch.tensor([1, 0, -100])).item(), 4)
    0.2201
    """
    return multi_label_bce_term(_without_last(logits, targets), targets, None, mask, pos_weight, ignore_index)


binary_cross_entropy = averaged(binary_cross_entropy_term)


def multi_label_bce_term(
    logits: Tensor,
    targets: Tensor,
    label_weights: Tensor | None = None,
    mask: Tensor | None = None,
    pos_weight: Tensor | float | None = None,
    ignore_index: int | None = IGNORE_INDEX,
) -> LossTerm:
    """Return the weighted sum of the losses of all labels, and the sum of the weights.

    `logits` and `targets` are (…, K) for K labels, `label_weights` is (K,). The count is weighted like the sum, as in
    cross entropy with class weights: the weights are relative and do not scale the loss, and the weight of a missing
    label does not count. `mask` is (…, K), or (…) for whole samples. Everything else is as in
    `binary_cross_entropy_term`; `pos_weight` may be (K,).

    >>> logits, targets = torch.tensor([[2.0, -1.0, 0.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    >>> round(multi_label_bce(logits, targets).item(), 4)
    0.3778
    >>> round(multi_label_bce(logits, targets, label_weights=torch.tensor([1.0, 1.0, 0.0])).item(), 4)
    0.2201
    """
    _check_weights("label_weights", label_weights, logits)
    if logits.shape != targets.shape:
        hint = "; class indices need cross entropy" if targets.shape == logits.shape[:-1] else ""
        raise TrainingError(
            f"binary labels of shape {tuple(targets.shape)} do not fit the model's output of shape "
            f"{tuple(logits.shape)}: every logit needs its own label{hint}"
        )
    if logits.dtype is torch.bfloat16 or logits.dtype is torch.float16:
        logits = logits.float()
    weights = element_weights(targets, mask, label_weights, ignore_index)
    labels = _filled(targets, weights)
    if targets.is_cpu and not torch.compiler.is_compiling():
        LabelRange().add(labels, 0, 1, OUT_OF_RANGE)
    labels = labels.to(logits.dtype)
    if weights is None:
        return LossTerm(_losses(logits, labels, pos_weight).sum(), targets.numel())
    # Ignored elements must not reach the sum or a gradient even if they are not finite: 0 · inf is NaN.
    losses = _losses(logits.masked_fill(weights == 0, 0.0), labels, pos_weight)
    return LossTerm((losses * weights).sum(), _count(targets, weights))


multi_label_bce = averaged(multi_label_bce_term)


@register("loss", "binary_cross_entropy")
class BinaryLoss(LossStrategy):
    """Binary cross entropy of logits (B, …) or (B, …, 1) with labels (B, …): 0 and 1, or probabilities."""

    @checked
    def __init__(
        self, pos_weight: Annotated[float, Gt(0)] | None = None, ignore_index: int | None = IGNORE_INDEX
    ) -> None:
        """Labels that are NaN or `ignore_index` do not count; `pos_weight` weights positive labels."""
        self.ignore_index = ignore_index
        self._pos_weight: Tensor | float | None = pos_weight
        self._label_weights: Tensor | None = None
        self._range = LabelRange()

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:
        """Return "loss", and with `metrics` "accuracy": the share of labels on the right side of a logit of 0."""
        labels = required_labels(batch, type(self).__name__)
        logits = _without_last(logits_of(output), labels)
        self._place(logits.device)
        weights, skip = self._label_weights, self.ignore_index
        _check_weights("pos_weight", self._pos_weight, logits)
        if not labels.is_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Labels on the host are checked with the loss, others with a log point: reading them would synchronise.
            self._range.add(_filled(labels, present_labels(labels, None, skip)), 0, 1, OUT_OF_RANGE)
        terms = {"loss": multi_label_bce_term(logits, labels, weights, None, self._pos_weight, skip)}
        if metrics:
            terms["accuracy"] = binary_accuracy_term(logits, labels, skip)
        return terms

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:  # noqa: ARG002
        """Return nothing; raise DataError if there were labels out of range on a device."""
        self._range.check()
        return {}

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of labels present, or the sum of their weights."""
        labels = required_labels(batch, type(self).__name__)
        self._place(labels.device)
        return {"loss": _count(labels, element_weights(labels, None, self._label_weights, self.ignore_index))}

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits and labels; ignored labels are -100."""
        logits, labels = super().judged(output, batch)
        if self.ignore_index in (None, IGNORE_INDEX):
            return logits, labels
        return logits, labels.masked_fill(labels == self.ignore_index, IGNORE_INDEX)

    def _place(self, device: torch.device) -> None:
        """Move the weights to the model's device once and keep them there."""
        if self._label_weights is not None and self._label_weights.device != device:
            self._label_weights = self._label_weights.to(device)
        if isinstance(self._pos_weight, Tensor) and self._pos_weight.device != device:
            self._pos_weight = self._pos_weight.to(device)


@register("loss", "multi_label")
class MultiLabelLoss(BinaryLoss):
    """Binary cross entropy of logits (B, …, K) with K separate labels (B, …, K), any of which may be missing."""

    @checked
    def __init__(
        self,
        label_weights: list[Weight] | None = None,
        pos_weight: Annotated[float, Gt(0)] | list[Weight] | None = None,
        ignore_index: int | None = IGNORE_INDEX,
    ) -> None:
        """`label_weights` has one weight per label, included in the mean; `pos_weight` is one value or one each."""
        super().__init__(None, ignore_index)
        self._pos_weight = torch.tensor(pos_weight) if isinstance(pos_weight, list) else pos_weight
        self._label_weights = None if label_weights is None else torch.as_tensor(label_weights, dtype=torch.float32)


def binary_accuracy_term(logits: Tensor, targets: Tensor, ignore_index: int | None = IGNORE_INDEX) -> LossTerm:
    """Return how many of the present labels are on the same side of 0 as their logit: a metric, without gradient.

    A NaN is on neither side.

    >>> binary_accuracy_term(torch.tensor([3.0, -3.0, 3.0]), torch.tensor([1, 1, -100]))
    LossTerm(sum=tensor(1), count=tensor(2), weight=0.0)
    """
    present = present_labels(targets, None, ignore_index)
    right = torch.where(targets > 0.5, logits > 0, logits <= 0)
    return LossTerm((right if present is None else right & present).sum(), _count(targets, present), 0.0)


def present_labels(targets: Tensor, mask: Tensor | None, ignore_index: int | None) -> Tensor | None:
    """Return which labels are present (bool) or their weights (a floating-point mask); None if all count equally."""
    present: Tensor | None = None
    if ignore_index is not None and targets.dtype is not torch.bool:
        present = targets.ne(ignore_index)
        if targets.is_floating_point():
            present = present & ~targets.isnan()
    if mask is None:
        return present
    if mask.shape == targets.shape[:-1] != targets.shape:
        mask = mask.unsqueeze(-1).expand(targets.shape)
    if mask.shape != targets.shape:
        raise TrainingError(
            f"a mask of shape {tuple(mask.shape)} does not fit labels of shape {tuple(targets.shape)}; use the same "
            "shape for both"
        )
    if not mask.is_floating_point():
        mask = mask.ne(0)
    return mask if present is None else mask * present


def element_weights(
    targets: Tensor, mask: Tensor | None, label_weights: Tensor | None, ignore_index: int | None
) -> Tensor | None:
    """Return the weight of every label; None if all count equally."""
    present = present_labels(targets, mask, ignore_index)
    if label_weights is None:
        return present
    weights = label_weights.to(targets.device)
    return weights.expand(targets.shape) if present is None else present * weights


def _losses(logits: Tensor, labels: Tensor, pos_weight: Tensor | float | None) -> Tensor:
    """Return −y·log p − (1−y)·log(1−p) of every label.

    Torch's own kernel computes x − log p for y = 0, which loses the digits of a small loss, and its gradient p − y is
    0 as soon as p rounds to 1. Two log-sigmoids keep both accurate to the last digits.
    """
    positives = labels * F.logsigmoid(logits)
    if pos_weight is not None:
        positives = positives * (pos_weight.to(logits) if isinstance(pos_weight, Tensor) else pos_weight)
    return (labels - 1) * F.logsigmoid(-logits) - positives


def _check_weights(name: str, weights: Tensor | float | None, logits: Tensor) -> None:
    if isinstance(weights, Tensor) and weights.dim() and weights.shape != logits.shape[-1:]:
        raise TrainingError(
            f"there are {weights.numel()} {name}, but the model's output of shape {tuple(logits.shape)} has "
            f"{logits.shape[-1] if logits.dim() else 1} labels; pass one per label"
        )


def _without_last(logits: Tensor, targets: Tensor) -> Tensor:
    """Drop the last dimension of size 1 of the logits, if the targets lack it."""
    return logits.squeeze(-1) if logits.shape == (*targets.shape, 1) else logits


def _filled(targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the targets with 0 where they do not count."""
    return targets if weights is None else targets.masked_fill(weights == 0, 0)


def _count(targets: Tensor, weights: Tensor | None) -> Tensor | float:
    return targets.numel() if weights is None else weights.sum()
