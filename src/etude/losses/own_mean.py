"""What the loss that a model computes itself is a mean over.

A model returns a mean and does not say over what. So the first batch is used to find out: the losses of two samples
alone and of both together show whether the mean is over labels or over samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from etude.core.batch import Batch, num_samples, padding_mask_of, targets_of
from etude.core.buffers import probing
from etude.core.errors import TrainingError
from etude.core.forms import kind_of, parts_of, with_parts
from etude.core.model import ModelCall, unwrap
from etude.core.random import aside
from etude.losses.functional import IGNORE_INDEX

CLOSE = 1e-3
"""Relative difference up to which a loss is taken for the sum over two samples."""
EXACT = 1e-5
"""Relative difference up to which rounding leaves no doubt that a loss is a mean."""
INEXACT = 2e-2
"""Relative difference from which it is none; half precision stays below."""
ROUNDINGS = 8
"""A difference up to so many roundings is explained by them."""
SHOWN, ABOUT, NOT, ASSUMED = "{}", "about {}, as far as half precision shows", "not {}", "taken for {}"


class Mean(NamedTuple):
    """What a model's loss is a mean over: labels, without negative ones, or samples."""

    over_labels: bool
    shift: bool = False
    """Whether the first label of every row does not count, because the model shifts the labels."""
    ignore_index: int = IGNORE_INDEX
    """A label that does not count, beside negative ones."""
    masked: bool = False
    """Whether labels do not count where the attention mask is 0."""
    evidence: str = SHOWN
    """What the batches have shown: NOT for a loss that is no such mean, as with class weights or contrasts."""

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
        if self.evidence == NOT:
            return f"not a mean over labels or samples, weighted by {over}"
        return self.evidence.format(f"a mean over {over}")


SAMPLES = Mean(over_labels=False)


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


def has_classes(batch: Batch) -> bool:
    """Whether the labels of a batch are classes."""
    labels = targets_of(batch)[0]
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 0


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


def loss_without_effects(call: ModelCall, model: nn.Module, batch: Batch, seed: int = 0) -> Tensor | None:
    """Return the model's own loss of a batch in eval mode, or None; nothing changes."""
    with trying(model), aside(seed):
        return own_loss(call.with_labels(model, batch))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute without autocast and without TF32."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def find_mean(call: ModelCall, model: nn.Module, batch: Batch) -> Mean | None:
    """Return what the model's own loss is a mean over; None if this batch does not show it. Waits for the device.

    Raises TrainingError if the loss is a sum.
    """
    model = unwrap(model)
    if kind_of(batch) not in ("tuple", "mapping"):
        return SAMPLES._replace(evidence=ASSUMED)
    labels = targets_of(batch)[0]
    if isinstance(labels, Tensor) and labels.dim() and len(labels) != num_samples(batch):
        # such as those of masked positions only: which of them belong to a sample is not known
        return Mean(over_labels=has_classes(batch), evidence=ASSUMED)
    if num_samples(batch) < 2:
        return None
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    for precision in (full_precision(device), nullcontext()):  # some kernels need autocast
        try:
            with precision:
                return _compare(call, model, batch)
        except SumError:
            raise
        except Exception:  # the model's own code: it may need whole batches; the real call shows its error, if any
            continue
    return None


class SumError(TrainingError):
    """The loss is a sum."""


def _compare(call: ModelCall, model: nn.Module, batch: Batch) -> Mean | None:
    """Compare the loss of two samples with those of each alone."""

    def loss_of(*rows: int, seed: int = 0) -> Tensor:
        loss = loss_without_effects(call, model, _rows(batch, rows, size), seed)
        if loss is None:
            raise ValueError("no loss")
        return loss

    size = num_samples(batch)
    candidates = _candidates(call, model, batch, size)
    counts = (one.rows(batch) for one in candidates)
    pair = _pair(max(counts, key=lambda rows: float(rows.max() - rows.min())), targets_of(batch)[0])
    if pair is None:
        return None
    losses = [loss_of(row) for row in pair]
    (first, second), both = map(float, losses), float(loss_of(*pair))
    scale = max(abs(first), abs(second), abs(both), 1e-12)
    errors = [abs(_weighted((first, second), one.rows(batch)[list(pair)]) - both) / scale for one in candidates]
    error = min(errors)
    if abs(first + second - both) < CLOSE * scale < error * scale:
        raise SumError(
            f"the loss of {type(model).__name__} is a sum over samples; a loss must be a mean, which is divided by its "
            f"count over all micro-batches and processes: set its reduction to 'mean'{_setting(model)}"
        )
    found = candidates[next(place for place, one in enumerate(errors) if one <= error + 1e-6)]
    rounding = torch.finfo(losses[0].dtype).eps
    if error <= ROUNDINGS * rounding <= EXACT:
        return found
    if abs(float(loss_of(*pair, seed=1)) - both) > EXACT * scale:
        return candidates[0]._replace(evidence=ASSUMED)  # it draws random numbers, so no two values agree
    twice = [float(loss_of(row, row)) for row in pair]  # the same mean, but for rounding
    rounding += max(abs(twice[0] - first), abs(twice[1] - second)) / scale
    if error > min(ROUNDINGS * rounding, INEXACT):
        return found._replace(evidence=NOT)
    return found if error <= EXACT else found._replace(evidence=ABOUT)


def likeliest_mean(call: ModelCall, model: nn.Module, batch: Batch) -> Mean | None:
    """Return the mean to expect, of which even a single sample shows whether labels are shifted."""
    try:
        return _candidates(call, unwrap(model), batch, num_samples(batch))[0]
    except Exception:  # the model's own code
        return None


def _candidates(call: ModelCall, model: nn.Module, batch: Batch, size: int) -> list[Mean]:
    """Return what the loss may be a mean over, the likeliest first."""
    if not has_classes(batch):
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
    return (bool(with_first == without),)


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
