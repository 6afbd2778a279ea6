"""How often each class was predicted and true: the counts that precision, recall and a confusion matrix share."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from etude.core.arguments import checked
from etude.core.errors import ConfigError, DataError
from etude.distributed import World
from etude.metrics.base import Metric
from etude.metrics.inputs import (
    counted_elements,
    counted_labels,
    form_of,
    inferred_classes,
    predicted_classes,
    predicted_positives,
)

NumClasses = Annotated[int, Ge(2)] | None
NumLabels = Annotated[int, Ge(1)] | None
Threshold = Annotated[float, Gt(0), Lt(1)]
Counts = npt.NDArray[np.int64]

MOST_CELLS = 128**2
"""Up to this size all classes are counted against all others; beyond, only if a confusion matrix is wanted."""


class ClassCounts(Metric):
    """Shared by precision, recall, F1 and the confusion matrix: the kind of input, and how often each class occurs.

    The counts are those of a confusion matrix with one more column, for NaN predictions: C × (C + 1) for classes, and
    2 × 3 for every binary label. Of many classes only three counts each are kept: correct, predicted and true.
    """

    @checked
    def __init__(
        self,
        num_classes: NumClasses,
        num_labels: NumLabels,
        threshold: Threshold,
        ignore_index: int | None,
        class_dim: int | None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if num_classes is not None and num_labels is not None:
            raise ConfigError(
                f"{type(self).__name__}: set num_classes for classes or num_labels for labels, not both"
            )
        self.num_classes, self.num_labels, self.threshold = num_classes, num_labels, threshold
        self._given_classes = num_classes
        self.ignore_index, self.class_dim = ignore_index, class_dim
        self.class_names = None if class_names is None else list(class_names)
        self.needs_matrix = False
        """Whether the counts of all pairs of classes are needed, however many classes there are."""
        self.is_settled = num_classes is not None or num_labels is not None
        """Whether the kind of input is known; else the first batch decides whether it is binary."""
        self.source: ClassCounts | None = None
        """Another metric with the same counts, which counts for this one too."""

    @property
    def size(self) -> int:
        """Number of classes or labels: 1 for binary."""
        return self.num_classes or self.num_labels or 1

    @property
    def has_matrix(self) -> bool:
        """Whether all pairs of classes are counted."""
        return self.needs_matrix or self.size**2 <= MOST_CELLS

    @property
    def num_sums(self) -> int:  # type: ignore[override]
        """The number of counts."""
        if self.num_classes is None:
            return 6 * self.size
        return self.size * (self.size + 1) if self.has_matrix else 3 * self.size

    def same_counts(self) -> tuple[Any, ...]:
        """Return what the counts depend on: metrics in which it is equal can share them.

        The given number of classes, not the one that was found: which metrics share must not change in a run, or a
        resumed one would look for the counts of another metric.
        """
        return self._given_classes, self.num_labels, self.threshold, self.ignore_index, self.class_dim

    # --- counting

    def update(self, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Add one batch; elements where `mask` is zero do not count. Does not synchronise."""
        if not self.is_settled:
            found = inferred_classes(predictions, targets, self.class_dim, type(self).__name__)
            self._settle(found, True)  # sums of a checkpoint may be those of a rank that had no samples
        is_simple = predictions.dim() == 2 and mask is None and predictions.is_cpu and targets.dtype is torch.int64
        if not (is_simple and self._count_on_host(predictions, targets)):
            super().update(predictions, targets, mask)

    def _count_on_host(self, logits: Tensor, targets: Tensor) -> bool:
        """Count logits (N, C) with NumPy, which finds the largest several times faster; False if something is odd."""
        size, skip = self.num_classes, self.ignore_index
        if (
            size is None
            or logits.dtype not in (torch.float32, torch.float64)
            or logits.shape != (targets.numel(), size)
            or (skip is not None and 0 <= skip < size)
            or not self.has_matrix
        ):
            return False
        logits = logits.detach() if logits.requires_grad else logits
        if math.isnan(logits.sum().item()):
            return False
        cells = targets.numpy() * (size + 1)
        cells += logits.numpy().argmax(1)
        try:  # any label that is no class gives an impossible cell
            counts = np.bincount(cells, minlength=size * (size + 1))
        except (ValueError, MemoryError):
            return False
        if len(counts) > size * (size + 1):
            return False
        self.sums_on(logits.device).numpy().__iadd__(counts)
        return True

    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the counts of one batch."""
        if self.num_classes is None:
            return self._label_counts(predictions, targets, mask)
        classes, labels, counted, none = read = self._read_classes(predictions, targets, mask)
        size = self.size
        if self.has_matrix:
            # An invalid class would fall into a cell of another row: move it beyond the last one.
            beyond = (classes < 0) | (classes >= size)
            cells = torch.where(beyond & ~none, self.num_sums, labels * (size + 1) + classes.masked_fill(none, size))
            return self._count_ids(self.num_sums, cells, counted, read)
        named = counted * ~none
        columns = (labels, named * (classes == labels)), (classes.masked_fill(none, 0), named), (labels, counted)
        return torch.cat([self._count_ids(size, ids, weights, read) for ids, weights in columns])

    def _read_classes(
        self, predictions: Tensor, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return predicted and true class ids, which count (int64), and which predictions are NaN, each 1-D.

        Ids that do not count are 0.
        """
        who = type(self).__name__
        if targets.is_floating_point():
            raise DataError(f"{who}: targets {form_of(targets)} are not class ids; they must be integers")
        classes, none = predicted_classes(predictions, targets, self.size, self.class_dim, who)
        counted = counted_elements(targets, mask, self.ignore_index, who)
        found = [ids.long().masked_fill(~counted, 0).flatten() for ids in (classes, targets)]
        if not targets.is_cpu:  # where an id out of range would end the process; on the host counting notices it
            found = [self.check_classes(ids, self.size, "predictions or targets") for ids in found]
        return *found, counted.flatten().long(), none.flatten()  # type: ignore[return-value]

    def _count_ids(self, size: int, ids: Tensor, counted: Tensor, read: tuple[Tensor, ...]) -> Tensor:
        """Return how often each id below `size` occurs among those counted; raise DataError for a larger one.

        Not `bincount`, which reads the largest id from the device.
        """
        try:
            return counted.new_zeros(size).scatter_add_(0, ids, counted)
        except RuntimeError as error:  # only on the CPU; on a GPU an assertion in the kernel ends the process
            for what, found in zip(("predictions", "targets"), read[:2], strict=True):
                wrong = found[(found < 0) | (found >= self.size)]
                if wrong.numel():
                    raise DataError(
                        f"{type(self).__name__}: {what} hold the class {int(wrong[0])}, but num_classes is {self.size} "
                        f"(0 … {self.size - 1})"
                    ) from error
            raise

    def _label_counts(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return the 2 × 3 counts of every label: false or true, and predicted no, yes, or NaN."""
        who = type(self).__name__
        if self.num_labels is not None and targets.shape[-1:] != (self.num_labels,):
            raise DataError(
                f"{who}: targets {form_of(targets)} do not fit num_labels {self.num_labels}, their last dimension"
            )
        yes, no = predicted_positives(predictions, targets, self.threshold, who)
        counted = counted_labels(targets, mask, self.ignore_index, who)
        true = targets > 0.5
        cells = [row & column & counted for row in (~true, true) for column in (no, yes, ~(no | yes))]
        return torch.stack(cells, -1).reshape(-1, self.num_sums).sum(0)

    # --- reading the counts

    def state(self) -> Tensor:
        """Return a copy of the counts, those of `source` if there is one."""
        if (source := self.source) is not None:
            self.num_classes, self.is_settled, self.needs_matrix = (
                source.num_classes,
                source.is_settled,
                source.needs_matrix,
            )
            self._sums = source._sums
        return super().state()

    def reset(self) -> None:
        """Reset to the initial state; a metric that shared another one's counts has its own from now on."""
        if self.source is not None:
            self.source = self._sums = None
        super().reset()

    def matrix(self, sums: Any) -> Counts:
        """Return the counts of pairs: (C, C + 1), or (K, 2, 3) for labels."""
        shape = (self.size, 2, 3) if self.num_classes is None else (self.size, self.size + 1)
        return np.asarray(sums, dtype=np.int64).reshape(shape)

    def columns(self, sums: Any) -> Sequence[Counts]:
        """Return for every class how often it was correct, predicted and true, and how often it occurred at all."""
        if self.num_classes is None:
            cells = self.matrix(sums)
            return cells[:, 1, 1], cells[:, :, 1].sum(1), cells[:, 1].sum(1), cells.sum((1, 2))
        if self.has_matrix:
            cells = self.matrix(sums)
            right, predicted, true = cells.diagonal(), cells[:, :-1].sum(0), cells.sum(1)
        else:
            right, predicted, true = np.asarray(sums, dtype=np.int64).reshape(3, self.size)
        return right, predicted, true, predicted + true

    def accuracy(self) -> float:
        """Return the share of correct elements, of classes or of binary labels. Synchronises."""
        sums = self.state().tolist()
        cells = self.matrix(sums) if self.num_classes is None else None
        right, _, true, _ = self.columns(sums)
        correct, count = (right, true) if cells is None else (cells[:, (0, 1), (0, 1)], cells)
        return int(correct.sum()) / total if (total := int(count.sum())) else math.nan

    # --- ranks and checkpoints

    def gather(self, world: World, device: torch.device) -> None:
        """Replace the counts by those over all ranks; one without batches learns from the others what they count."""
        if world.size > 1 and not self.num_labels:
            classes, settled = world.host_max([self.num_classes or 0, int(self.is_settled)])
            self._settle(classes or None, bool(settled))
        super().gather(world, device)

    def merge(self, other: Self) -> None:
        """Add the counts of another metric of the same kind, which may know the classes already."""
        if other.is_settled and not self.is_settled:
            self._settle(other.num_classes, True)
        if other.is_settled:
            super().merge(other)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the number of classes once it is known."""
        return {**super().state_dict(), "num_classes": self.num_classes or 0, "is_settled": self.is_settled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums."""
        self._settle(state["num_classes"] or None, state["is_settled"])
        super().load_state_dict(state)

    def unsettle(self) -> None:
        """Forget the number of classes that the data of an earlier run has shown."""
        self._settle(self._given_classes, self._given_classes is not None or self.num_labels is not None)

    def _settle(self, num_classes: int | None, is_settled: bool) -> None:
        if num_classes != self.num_classes:
            self._sums = None
        self.num_classes, self.is_settled = num_classes, is_settled
