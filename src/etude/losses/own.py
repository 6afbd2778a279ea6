"""The loss that a model computes itself, as a sum and a count."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.config.registry import register
from etude.core.batch import Batch, targets_of
from etude.core.errors import CheckpointError, TrainingError
from etude.core.model import ModelCall
from etude.core.task import LossTerm, Terms
from etude.losses.functional import IGNORE_INDEX
from etude.losses.own_mean import ASSUMED, Mean, find_mean, has_classes, likeliest_mean, own_loss
from etude.losses.strategies import LossStrategy, logits_of, required_labels

MAX_ATTEMPTS = 5
"""After so many batches that show nothing, a loss counts as a mean over labels, or over samples without classes."""


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
            self.mean = self._mean(batch)._replace(evidence=ASSUMED)
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
        self._likely = None

    def _mean(self, batch: Batch) -> Mean:
        return self.mean or self._likely or Mean(over_labels=has_classes(batch))
