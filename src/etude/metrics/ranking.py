"""Metrics of ranked scores: the area under the ROC curve, and average precision.

    AUROC()                   binary: logits and labels (…); or classes against the rest, if there are more than two
    AUROC(num_classes=5)      classes: logits (…, 5), labels (…): the softmax of each class against the rest
    AUROC(num_labels=5)       labels: logits and labels (…, 5), each label 0 or 1

The result is exact. Half-precision scores have 65,536 values, so they are counted, and counts of batches and ranks
add up. Other scores are kept, 8 bytes per score and label in float32, and sorted at the end.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import ConfigError, DataError
from etude.distributed import World
from etude.metrics.base import PER_CLASS, Kept, named_scores
from etude.metrics.counts import NumClasses, NumLabels
from etude.metrics.inputs import (
    binary_scores,
    class_dim_of,
    counted_elements,
    counted_labels,
    form_of,
    inferred_classes,
)

Array = npt.NDArray[np.float64]
HALF = {torch.float16: 0, torch.bfloat16: 1}
"""Dtypes of scores that are counted, with their places among the counts."""
BINS = 2**16
MOST_BINNED = 64
"""Number of labels up to which half-precision scores are counted: each label takes a megabyte."""


class Ranking(Kept):
    """Shared by AUROC and average precision: a score and a binary label for every element, class or label.

    - macro: the mean over classes or labels
    - weighted: the mean weighted by the number of positives
    - none: one number for every class or label (`auroc_class0` …, or by `class_names`)

    Labels that are missing (`ignore_index`, NaN) do not count. A NaN score makes the result nan.
    """

    @checked
    def __init__(
        self,
        num_classes: NumClasses = None,
        num_labels: NumLabels = None,
        average: Literal["macro", "weighted", "none"] | None = "macro",
        ignore_index: int | None = -100,
        class_dim: int | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        if num_classes is not None and num_labels is not None:
            raise ConfigError(f"{who}: set num_classes for classes or num_labels for labels, not both")
        if average not in ("macro", "weighted", "none", None):
            raise ConfigError(f"{who}: average is '{average}'; it must be one of macro, weighted, none")
        self.num_classes, self.num_labels, self.average = num_classes, num_labels, average or "none"
        self.ignore_index, self.class_dim, self.class_names = ignore_index, class_dim, class_names
        self.name = type(self).name + PER_CLASS * (self.average == "none")
        self._bins: Tensor | None = None
        """Counts of half-precision scores: dtype, label, false or true, bit pattern."""

    @abstractmethod
    def area(self, positives: Array, negatives: Array) -> float:
        """Return the value of one class, given how many labels of each kind have each score, highest score first."""

    # --- batches

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add one batch. Does not synchronise."""
        who = type(self).__name__
        classes = self.num_classes
        if classes is None and self.num_labels is None:
            classes = inferred_classes(predictions, targets, self.class_dim, who)
        if classes is not None:
            self._rows.append(self._class_rows(predictions, targets, classes))
            return
        if predictions.dtype in HALF and self._count_on_host(predictions, targets):
            return
        scores, labels = self._scores_and_labels(predictions, targets)
        if scores.dtype in HALF and scores.shape[1] <= MOST_BINNED:
            self._count(scores, labels)
        else:
            kept = scores if scores.dtype is torch.float64 else scores.float()
            self._rows.append(torch.cat([kept, labels.to(kept)], 1))

    def _class_rows(self, logits: Tensor, targets: Tensor, classes: int) -> Tensor:
        """Return the probabilities of all classes, and which one is true: 0 … 1, NaN where there is no label."""
        who = type(self).__name__
        dim = class_dim_of(logits, targets, self.class_dim, who)
        if targets.is_floating_point() or logits.shape[dim] != classes:
            raise DataError(
                f"{who}: predictions {form_of(logits)} and targets {form_of(targets)} are not logits of num_classes "
                f"{classes} and class ids; make them equal"
            )
        wide = logits if logits.dtype is torch.float64 else logits.float()
        scores = wide.movedim(dim, -1).reshape(-1, classes).softmax(-1)
        counted = counted_elements(targets, None, self.ignore_index, who).flatten()
        ids = self.check_classes(targets.flatten().masked_fill(~counted, 0), classes)
        true = ids[:, None] == torch.arange(classes, device=targets.device)
        return torch.cat([scores, torch.where(counted[:, None], true.to(scores), math.nan)], 1)

    def _scores_and_labels(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and labels (elements, labels); labels are 0, 1 or NaN."""
        who, size = type(self).__name__, self.num_labels or 1
        if self.num_labels is not None and targets.shape[-1:] != (self.num_labels,):
            raise DataError(f"{who}: targets {form_of(targets)} do not fit num_labels {size}, their last dimension")
        scores = binary_scores(predictions, targets, who)
        if not scores.is_floating_point():
            scores = scores.float()
        counted = counted_labels(targets, None, self.ignore_index, who)
        labels = torch.where(counted, (targets > 0.5).float(), math.nan)
        return scores.reshape(-1, size), labels.reshape(-1, size)

    def _count(self, scores: Tensor, labels: Tensor) -> None:
        size = scores.shape[1]
        counted = ~labels.isnan()
        first = torch.arange(size, device=scores.device) + HALF[scores.dtype] * size
        places = (first * 2 + labels.nan_to_num(0.0).long()) * BINS + (scores.view(torch.int16).long() & (BINS - 1))
        self._bins_on(scores.device, size).scatter_add_(0, places.flatten(), counted.flatten().long())

    def _count_on_host(self, scores: Tensor, targets: Tensor) -> bool:
        """Count binary scores with labels 0 and 1 in fewer passes; False if they are anything else."""
        is_simple = scores.is_cpu and targets.dtype is torch.int64 and scores.shape == targets.shape
        if not is_simple or self.num_labels is not None or self.ignore_index in (0, 1):
            return False
        places = targets.numpy().ravel() << 16
        places += scores.detach().contiguous().view(torch.uint16).numpy().ravel()
        try:  # any label but 0 and 1 gives an impossible place
            counts = np.bincount(places, minlength=2 * BINS)
        except (ValueError, MemoryError):
            return False
        if len(counts) > 2 * BINS:
            return False
        self._bins_on(scores.device, 1).view(2, -1)[HALF[scores.dtype]].add_(torch.from_numpy(counts))
        return True

    def _bins_on(self, device: torch.device, size: int) -> Tensor:
        if self._bins is None or self._bins.device != device:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside it
                if self._bins is None:
                    self._bins = torch.zeros(2 * size * 2 * BINS, dtype=torch.int64, device=device)
                else:
                    self._bins = self._bins.to(device, non_blocking=device.type == "cuda")
        return self._bins

    # --- the value

    def compute(self) -> float | list[float]:
        """Return the average, or all values; nan if there is nothing. Synchronises."""
        self.check_labels()
        values, weights = [], []
        for score, positives, negatives in self._columns():
            counts = _by_score(score, positives, negatives)
            values.append(math.nan if counts is None else self.area(*counts))
            is_defined = self.is_defined(positives.sum(), negatives.sum())
            weights.append(is_defined * (positives.sum() if self.average == "weighted" else 1.0))
        if self.average == "none":
            return values
        there = [weight > 0 for weight in weights]  # not 0 · nan: a class without a value does not count
        return (
            float(np.average(np.array(values)[there], weights=np.array(weights)[there])) if any(there) else math.nan
        )

    def is_defined(self, positives: float, negatives: float) -> bool:
        """Whether a class or label with so many positives and negatives has a value."""
        return bool(positives + negatives)

    def results(self) -> dict[str, float]:
        """Return the average, or one value per class."""
        value = self.compute()
        return named_scores(self.name, value, self.class_names) if isinstance(value, list) else {self.name: value}

    def _columns(self) -> Sequence[tuple[Array, Array, Array]]:
        """Return scores and their numbers of positive and negative labels, for every class or label."""
        found: list[list[Array]] = []
        rows = self.all_rows()
        if rows is not None:
            scores, labels = rows.numpy().reshape(len(rows), 2, -1).transpose(1, 2, 0)
            found += [[score, label == 1, label == 0] for score, label in zip(scores, labels, strict=True)]
        if self._bins is not None:
            counts = self._bins.cpu().numpy().reshape(2, -1, 2, BINS).astype(np.float64)
            patterns = torch.arange(-BINS // 2, BINS // 2).to(torch.int16).roll(BINS // 2)
            halves = [patterns.view(dtype).double().numpy() for dtype in HALF]
            binned = [
                [np.concatenate(halves), *(np.concatenate([*counts[:, label, true]]) for true in (1, 0))]
                for label in range(counts.shape[1])
            ]
            pairs = zip(found or [[np.empty(0)] * 3] * len(binned), binned, strict=True)
            found = [[np.concatenate(pair) for pair in zip(kept, other, strict=True)] for kept, other in pairs]
        return [(score, one.astype(float), zero.astype(float)) for score, one, zero in found]

    # --- ranks and checkpoints

    def gather(self, world: World, device: torch.device) -> None:
        """Take the scores and counts of all ranks."""
        super().gather(world, device)
        if world.size > 1 and (size := world.host_max([0 if self._bins is None else self._bins.numel()])[0]):
            bins = torch.zeros(size, dtype=torch.int64) if self._bins is None else self._bins.clone()
            self._bins = world.sum(bins.to(device))

    def merge(self, other: Self) -> None:
        """Add the scores and counts of another metric."""
        super().merge(other)
        if other._bins is not None:
            self._bins = other._bins.clone() if self._bins is None else self._bins + other._bins.to(self._bins.device)

    def reset(self) -> None:
        """Drop all scores and counts."""
        super().reset()
        if self._bins is not None:
            self._bins.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return scores and counts."""
        return {**super().state_dict(), "bins": [] if self._bins is None else [self._bins.clone()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scores and counts."""
        super().load_state_dict(state)
        self._bins = next((bins.clone() for bins in state["bins"]), None)


def _by_score(scores: Array, positives: Array, negatives: Array) -> tuple[Array, Array] | None:
    """Return the numbers of positives and negatives of every distinct score, highest first; None if one is NaN."""
    there = positives + negatives > 0
    scores, positives, negatives = scores[there], positives[there], negatives[there]
    if np.isnan(scores).any():
        return None
    order = np.argsort(scores)[::-1]
    scores = scores[order]
    starts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]]) if len(scores) else np.empty(0, dtype=int)
    return tuple(np.add.reduceat(one[order], starts) if len(starts) else one for one in (positives, negatives))  # type: ignore[return-value]


@register("metric", "auroc")
class AUROC(Ranking):
    """The area under the ROC curve: the probability that a positive has a higher score than a negative.

    Classes or labels without positives or without negatives have no area: the average leaves them out, and is nan if
    no other is left.

    >>> auroc = AUROC()
    >>> auroc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> auroc.compute()
    0.75
    """

    name = "auroc"

    def area(self, positives: Array, negatives: Array) -> float:
        """Return the share of pairs in the right order; ties count half."""
        total = positives.sum() * negatives.sum()
        above = np.cumsum(positives) - positives / 2
        return float((above * negatives).sum() / total) if total else math.nan

    def is_defined(self, positives: float, negatives: float) -> bool:
        """Whether there are positives and negatives."""
        return bool(positives and negatives)


@register("metric", "average_precision")
class AveragePrecision(Ranking):
    """The mean precision over the positives, at the threshold of each: the area under the precision-recall curve.

    Without positives it is 0, as in scikit-learn.

    >>> precision = AveragePrecision()
    >>> precision.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> round(precision.compute(), 4)
    0.8333
    """

    name = "average_precision"

    def area(self, positives: Array, negatives: Array) -> float:
        """Return Σ precision · share of the positives with this score."""
        if not positives.sum():
            return 0.0 if len(negatives) else math.nan
        right = np.cumsum(positives)
        return float((right / (right + np.cumsum(negatives)) * positives).sum() / positives.sum())
