"""The loss that a model computes itself, as a sum and a count.

A model returns a mean and does not say over what. So the first batch is used to find out: the losses of two samples
alone and of both together show whether the mean is over labels or over samples.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import Batch, num_samples, padding_mask_of, targets_of
from etude.core.buffers import probing
from etude.core.errors import CheckpointError, TrainingError
from etude.core.forms import kind_of, parts_of, with_parts
from etude.core.model import ModelCall, unwrap
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX
from etude.losses.strategies import LossStrategy, logits_of, required_labels

MAX_ATTEMPTS = 5
"""After so many batches that show nothing, a loss counts as a mean over labels, or over samples without classes."""
CLOSE = 1e-3
"""Relative difference up to which a loss is taken for the sum over two samples."""
INEXACT = 2e-2
"""Relative difference from which a loss is no mean over labels or samples; half precision stays below."""


class Mean(NamedTuple):
    """What a model's loss is a mean over: labels, without negative ones, or samples."""

    over_labels: bool
    shift: bool = False
    """Whether the first label of every row does not count, because the model shifts the labels."""
    ignore_index: int = IGNORE_INDEX
    """A label that does not count, beside negative ones."""
    masked: bool = False
    """Whether labels do not count where the attention mask is 0."""
    exact: bool = True
    """False if the first batch has shown that the loss is no such mean, as with class weights or contrasts."""

    def total(self, batch: Batch) -> Tensor | float:
        """Return the number of labels or samples in a batch."""
        return self._counted(batch).sum() if self.over_labels else num_samples(batch)

    def rows(self, batch: Batch) -> Tensor:
        """Return the count of every sample."""
        if not self.over_labels:
            return torch.ones(num_samples(batch))
        return self._counted(batch).flatten(1).sum(1).cpu()

    def _counted(self, batch: Batch) -> Tensor:
        found, already_shifted = targets_of(batch)
        labels: Tensor = found if found.dim() > 1 else found[:, None]
        counted = (labels >= 0) & (labels != self.ignore_index)
        mask = padding_mask_of(batch) if already_shifted or self.masked else None
        counted = counted if mask is None else counted & (mask != 0)
        return counted[:, 1:] if self.shift and not already_shifted else counted

    @property
    def text(self) -> str:
        """In words."""
        without = f", without {self.ignore_index}" if self.ignore_index >= 0 else ""
        over = f"labels{without}" if self.over_labels else "samples"
        return f"a mean over {over}" if self.exact else f"not a mean over labels or samples, weighted by {over}"


SAMPLES = Mean(over_labels=False)


@register("loss", "model")
class ModelLoss(LossStrategy):
    """The loss that the model computes itself from inputs and labels: `.loss`, `["loss"]` or `(logits, loss)`.

    It must be a mean. The first batch with two samples shows whether over labels (negative ones, such as -100, do not
    count) or over samples; ragged micro-batches are weighted by that count. A loss that is neither, such as a
    contrastive one, is weighted by samples, or by labels if it has classes as labels.
    """

    def __init__(self) -> None:
        self.mean: Mean | None = None
        """What the loss is a mean over; None until a batch has shown it."""
        self._likely: Mean | None = None
        """What the last batch suggests that did not show it."""
        self._said = ""
        self._attempts = 0

    def run(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model with its labels."""
        if self.mean is None and not torch.compiler.is_compiling():
            self.find_out(call, model, batch)
        return call.with_labels(model, batch)

    def find_out(self, call: ModelCall, model: nn.Module, batch: Batch) -> None:
        """Find out from a batch what the loss is a mean over. Synchronises with the device."""
        self._attempts += 1
        self.mean = find_mean(call, model, batch)
        if self.mean is None:
            self._likely = likeliest_mean(call, model, batch)
        if self.mean is None and self._attempts == MAX_ATTEMPTS:
            self.mean = self._mean(batch)
        self._said = "" if self.mean is None else f"the loss is the model's own, {self.mean.text}"

    def outputs(self, call: ModelCall, model: nn.Module, batch: Batch) -> Any:
        """Run the model with its labels."""
        return call.with_labels(model, batch)

    def terms(self, output: Any, batch: Batch, *, metrics: bool) -> Terms:  # noqa: ARG002 - it computes no metrics
        """Return "loss"; raise TrainingError if the model computes none."""
        loss = own_loss(output)
        if loss is None:
            held = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
            raise TrainingError(
                f"loss 'model': the model returned no loss, but a {type(output).__name__}{held}; its forward needs "
                "labels (a parameter `labels` or `targets`) and must return a scalar `loss`, or set another loss"
            )
        count = self._mean(batch).total(batch)
        return {"loss": LossTerm(loss.float().reshape(()) * count, count)}

    def counts(self, batch: Batch) -> Mapping[str, Tensor | float] | None:
        """Return the number of labels or samples; None while it is unknown which of them counts."""
        return None if self.mean is None else {"loss": self.mean.total(batch)}

    def constants(self) -> Hashable:
        """Return what the loss is a mean over."""
        return self.mean

    def judged(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits, and the labels as the loss aligns them."""
        labels, already_shifted = required_labels(batch, "a metric"), targets_of(batch)[1]
        mean = self._mean(batch)
        if mean.shift and not already_shifted:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        if not labels.is_floating_point():
            labels = labels.masked_fill((labels < 0) | (labels == mean.ignore_index), IGNORE_INDEX)
        logits = logits_of(output)
        return logits[:, : labels.shape[1]] if already_shifted else logits, labels

    def announcement(self) -> str | None:
        """Return what the loss is a mean over."""
        return None if self.mean is None else self._said

    def decisions(self) -> dict[str, Any]:
        """Return what the loss is a mean over; before a batch has shown it, how many have not."""
        if self.mean is None:
            return {"attempts": self._attempts} if self._attempts else {}
        return {"mean": list(self.mean[:4])}

    def decide(self, decisions: Mapping[str, Any]) -> None:
        """Restore what the loss is a mean over."""
        saved, self._said = decisions.get("mean"), ""
        if saved is not None and [type(one) for one in saved] != [bool, bool, int, bool]:
            raise CheckpointError(f"mean: found {saved!r:.60}, expected {list(Mean._fields[:4])}")
        attempts = decisions.get("attempts", 0)
        if type(attempts) is not int or not 0 <= attempts < MAX_ATTEMPTS:
            raise CheckpointError(f"attempts: found {attempts!r:.60}, expected 0 … {MAX_ATTEMPTS - 1}")
        self.mean, self._attempts = None if saved is None else Mean(*saved), attempts

    def _mean(self, batch: Batch) -> Mean:
        return self.mean or self._likely or Mean(over_labels=_has_classes(batch))


def own_loss(output: Any) -> Tensor | None:
    """Return the scalar loss in a model's output, or None.

    >>> own_loss((torch.zeros(2, 3), torch.tensor(0.5)))
    tensor(0.5000)
    """
    if isinstance(output, (tuple, list)) and not isinstance(output, Mapping):
        return next((one for one in output if _is_scalar(one)), None)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if _is_scalar(found) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.dim() < 2 and value.is_floating_point()


def _has_classes(batch: Batch) -> bool:
    labels = targets_of(batch)[0]
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 0


# ------------------------------------------------------------------------------------------------ finding the mean


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode without side effects.

    A classifier of Hugging Face writes the kind of its first labels into its config; that is undone too.
    """
    config = getattr(model, "config", None)
    before = problem_type(model)
    try:
        with probing(model, training=False):
            yield
    finally:
        if problem_type(model) != before:
            config.problem_type = before  # type: ignore[union-attr]


def problem_type(model: nn.Module) -> str | None:
    """Return what a classifier of Hugging Face is set to learn, such as several labels; None if that is open."""
    return getattr(getattr(model, "config", None), "problem_type", None)


def loss_without_effects(call: ModelCall, model: nn.Module, batch: Batch) -> float | None:
    """Return the model's own loss of a batch in eval mode, or None; nothing changes. Waits for the device."""
    with trying(model):
        loss = own_loss(call.with_labels(model, batch))
    return None if loss is None else float(loss)


def find_mean(call: ModelCall, model: nn.Module, batch: Batch) -> Mean | None:
    """Return what the model's own loss is a mean over; None if this batch does not show it. Waits for the device.

    Raises TrainingError if the loss is a sum.
    """
    model = unwrap(model)
    size = num_samples(batch)
    if kind_of(batch) not in ("tuple", "mapping"):
        return SAMPLES
    if size < 2:
        return None

    def loss_of(rows: Sequence[int]) -> float:
        loss = loss_without_effects(call, model, _rows(batch, rows, size))
        if loss is None:
            raise ValueError("no loss")
        return loss

    try:
        candidates = _candidates(call, model, batch, size)
        counts = (one.rows(batch) for one in candidates)
        pair = _pair(max(counts, key=lambda rows: float(rows.max() - rows.min())), targets_of(batch)[0])
        if pair is None:
            return None
        alone, both = [loss_of([row]) for row in pair], loss_of(pair)
    except Exception:  # the model's own code: it may need whole batches; the real call shows its error, if any
        return None
    means = [_weighted(alone, one.rows(batch)[list(pair)]) for one in candidates]
    errors = [abs(mean - both) for mean in means]
    scale = max(abs(both), 1e-12)
    if abs(sum(alone) - both) < CLOSE * scale < min(errors):
        raise TrainingError(
            f"the loss of {type(model).__name__} is a sum over samples; a loss must be a mean, which is divided by its "
            f"count over all micro-batches and processes: set its reduction to 'mean'{_setting(model)}"
        )
    found = candidates[next(place for place, error in enumerate(errors) if error <= min(errors) + 1e-6 * scale)]
    return found._replace(exact=min(errors) <= INEXACT * scale)


def likeliest_mean(call: ModelCall, model: nn.Module, batch: Batch) -> Mean | None:
    """Return the mean to expect, of which even a single sample shows whether labels are shifted."""
    try:
        return _candidates(call, unwrap(model), batch, num_samples(batch))[0]
    except Exception:  # the model's own code
        return None


def _candidates(call: ModelCall, model: nn.Module, batch: Batch, size: int) -> list[Mean]:
    """Return what the loss may be a mean over, the likeliest first."""
    if not _has_classes(batch):
        return [SAMPLES]
    labels = targets_of(batch)[0]
    shifts: tuple[bool, ...] = (False,)
    if labels.dim() == 2 and labels.shape[0] == size and isinstance(batch, Mapping) and labels.shape[1] > 1:
        shifts = _shifts(call, model, batch, labels)
    config = getattr(model, "config", None)
    names = [name for name in dir(config) if name.endswith("ignore_index")]
    ignored = [value for name in names if isinstance(value := getattr(config, name), int) and value >= 0]
    found = [Mean(True, shift, value) for value in [*ignored, IGNORE_INDEX] for shift in shifts]
    mask = padding_mask_of(batch)
    if mask is not None and mask.shape == labels.shape:
        found += [one._replace(masked=True) for one in found]
    return [*found, SAMPLES]


def _shifts(call: ModelCall, model: nn.Module, batch: Mapping[str, Any], labels: Tensor) -> tuple[bool, ...]:
    """Return whether the first labels do not count: then the loss is the same without them."""
    key = next((key for key, value in batch.items() if value is labels), None)
    first = labels[:, 0] != IGNORE_INDEX
    if key is None or not first.any():
        return (False, True)
    others = labels.clone()
    others[:, 0] = IGNORE_INDEX
    with_first, without = (loss_without_effects(call, model, {**batch, key: one}) for one in (labels, others))
    return (with_first == without,)


def _pair(counts: Tensor, labels: Any) -> tuple[int, int] | None:
    """Return two samples whose counts differ most, of those with labels; of equal ones, those with other classes."""
    rows = counts.nonzero().flatten().tolist()
    if len(rows) < 2:
        return None
    is_class = isinstance(labels, Tensor) and labels.shape == counts.shape
    classes = labels.tolist() if is_class else [0] * len(counts)
    ranked = sorted(rows, key=lambda row: (counts[row].item(), classes[row]))
    return ranked[0], ranked[-1]


def _weighted(values: Sequence[float], counts: Tensor) -> float:
    weights = counts.double() / counts.sum().clamp_min(1)
    return float((torch.tensor(values, dtype=torch.float64) * weights).sum())


def _rows(batch: Batch, rows: Sequence[int], size: int) -> Batch:
    """Return some samples of a batch."""

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[list(rows)] if value.dim() and value.shape[0] == size else value
        return [value[row] for row in rows] if isinstance(value, (list, tuple)) and len(value) == size else value

    parts: dict[Any, Any] = parts_of(batch) or {}
    return with_parts(batch, {key: pick(value) for key, value in parts.items()})


def _setting(model: nn.Module) -> str:
    """Return the name of the setting of a Hugging Face model that holds the reduction, for a message."""
    config = getattr(model, "config", None)
    found = [name for name in dir(config) if name.endswith("reduction") and getattr(config, name) == "sum"]
    return f" (model.config.{found[0]} = 'mean')" if found else ""
