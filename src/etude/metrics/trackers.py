"""Trackers for hand-written loops: averages of a loss, and a summary of a run."""

import math
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from etude.core.arguments import checked
from etude.metrics.base import Meter


class LossTracker(Meter):
    """Averages of a value over everything seen and over the last `window_size` updates.

    A tensor is copied on its device and not read until an average is requested. Sums are float64.

    >>> tracker = LossTracker(window_size=2)
    >>> for loss in (4.0, 2.0, torch.tensor(3.0)): tracker.update(loss)
    >>> tracker.get_average(), tracker.get_recent_average(), tracker.count
    (3.0, 2.5, 3)
    """

    @checked
    def __init__(self, window_size: Annotated[int, Ge(1)] = 100) -> None:
        self.window_size = window_size
        self._seen = 0
        """Values written to the ring buffer."""
        self._restored = 0
        """Values included only in the total: they left the window before the state was saved."""
        self._place(torch.zeros(window_size + 1), torch.device("cpu"))

    def update(self, value: float | Tensor) -> None:
        """Add one value. It is copied, so its graph is freed and its memory can be reused. Does not synchronise."""
        if not isinstance(value, Tensor):
            slot = self._cells[self._seen % self.window_size].fill_(value)
        else:
            if value.device != self._buffer.device and self._buffer.is_cpu:
                self._place(self._buffer, value.device)  # only at the first tensor
            slot = self._cells[self._seen % self.window_size].copy_(value.detach(), non_blocking=True)
        self._total.add_(slot)
        self._seen += 1

    @property
    def count(self) -> int:
        """The number of values added."""
        return self._restored + self._seen

    def get_average(self) -> float:
        """Return the mean of all values; nan if there are none. Synchronises."""
        return float(self._total) / self.count if self.count else math.nan

    def get_recent_average(self) -> float:
        """Return the mean of the last `window_size` values; nan if there are none. Synchronises."""
        recent = self.values
        return sum(recent) / len(recent) if recent else math.nan

    @property
    def values(self) -> list[float]:
        """The last `window_size` values, oldest first. Synchronises."""
        ring: list[float] = self._buffer[: min(self._seen, self.window_size)].tolist()
        oldest = self._seen % self.window_size if self._seen > self.window_size else 0
        return ring[oldest:] + ring[:oldest]

    def compute(self) -> float:
        """Return the mean of all values, as a list of metrics reports it."""
        return self.get_average()

    def reset(self) -> None:
        """Reset to the initial state."""
        self._seen = self._restored = 0
        self._buffer.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return count, total and recent values."""
        return {"count": self.count, "total": float(self._total), "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages; after a change of `window_size`, as many recent values as are available."""
        self.reset()
        for value in state["values"][-self.window_size :]:
            self.update(value)
        self._restored = state["count"] - self._seen
        self._total.fill_(state["total"])

    def _place(self, buffer: Tensor, device: torch.device) -> None:
        """Keep `buffer` on `device`: the ring of recent values, then the total."""
        dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        with torch.inference_mode(False):  # a buffer made in inference mode cannot be changed outside it
            self._buffer = buffer.to(device, dtype, non_blocking=True)
        *self._cells, self._total = self._buffer.unbind()


@dataclass(slots=True)
class TrainingMetrics:
    """Progress of a run in plain numbers: the current epoch and the best one.

    >>> metrics = TrainingMetrics(current_epoch=3)
    >>> metrics.update_val_metrics(loss=0.5, accuracy=0.9)
    >>> metrics.best_val_loss, metrics.best_epoch
    (0.5, 3)
    """

    current_epoch: int = 0
    current_batch: int = 0
    train_loss: float = 0.0
    train_accuracy: float = 0.0
    val_loss: float = 0.0
    val_accuracy: float = 0.0
    best_val_loss: float = math.inf
    best_val_accuracy: float = 0.0
    best_epoch: int = 0
    """The epoch of `best_val_loss`."""

    def reset_epoch(self) -> None:
        """Begin an epoch: reset its batch and training metrics, keep those of validation and the best."""
        self.current_batch = 0
        self.train_loss = 0.0
        self.train_accuracy = 0.0

    def update_train_metrics(self, loss: float, accuracy: float) -> None:
        """Set the training metrics of the current epoch."""
        self.train_loss, self.train_accuracy = float(loss), float(accuracy)

    def update_val_metrics(self, loss: float, accuracy: float) -> None:
        """Set the validation metrics; a lower loss makes the current epoch the best, a higher accuracy is kept."""
        self.val_loss, self.val_accuracy = float(loss), float(accuracy)
        if self.val_loss < self.best_val_loss:
            self.best_val_loss, self.best_epoch = self.val_loss, self.current_epoch
        self.best_val_accuracy = max(self.best_val_accuracy, self.val_accuracy)

    def summary(self) -> str:
        """Return the metrics in four lines."""
        return (
            f"epoch {self.current_epoch}, batch {self.current_batch}\n"
            f"training    loss {self.train_loss:.4f}  accuracy {self.train_accuracy:.4f}\n"
            f"validation  loss {self.val_loss:.4f}  accuracy {self.val_accuracy:.4f}\n"
            f"best        loss {self.best_val_loss:.4f} (epoch {self.best_epoch})  "
            f"accuracy {self.best_val_accuracy:.4f}"
        )

    def print_summary(self) -> None:
        """Print the summary."""
        sys.stdout.write(self.summary() + "\n")

    def state_dict(self) -> dict[str, float | int]:
        """Return the metrics by name."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore `state_dict`."""
        for name in asdict(self):
            setattr(self, name, state[name])
