"""Base classes of metrics: sums that stay on the device, one division and one host read in `compute`."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor


class Meter(ABC):
    """Anything in a list of metrics: a value that can be read, reset, saved and restored."""

    @abstractmethod
    def compute(self) -> float:
        """Return the value over everything since the last reset; nan if there is nothing. Synchronises."""

    @abstractmethod
    def reset(self) -> None:
        """Reset to the initial state."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, lists and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""


class Tally(ABC):
    """Counts of predictions and targets whose whole state is one vector of sums.

    Sums of batches, ranks and merged tallies add up to the sums of the whole, so the result never depends on how the
    data was split. A subclass defines the number of sums and what a batch adds.
    """

    num_sums: int
    dtype = torch.int64
    """Dtype of the sums; int64 counts exactly for any data set. A subclass that adds real numbers uses float64."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @abstractmethod
    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return what one batch adds to the sums: a vector of `num_sums` on the device of the batch."""

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Add one batch; elements where `mask` is zero do not count. Does not synchronise."""
        sums = self.batch_sums(predictions, targets, mask).to(self.dtype)
        if self._sums is not None:
            # Not in place: a tensor made under inference_mode cannot be changed outside it.
            sums = self._sums.to(sums.device, non_blocking=sums.is_cuda) + sums
        self._sums = sums

    def reset(self) -> None:
        """Reset to the initial state."""
        self._sums = None

    def state(self) -> Tensor:
        """Return a copy of the sums; summed over ranks, they are those of all data."""
        return torch.zeros(self.num_sums, dtype=self.dtype) if self._sums is None else self._sums.clone()

    def load_state(self, sums: Tensor) -> None:
        """Replace the sums, for example by those of all ranks."""
        self._sums = sums.to(self.dtype, copy=True)

    def merge(self, other: Self) -> None:
        """Add the sums of another tally of the same kind."""
        sums = self.state()
        self._sums = sums + other.state().to(sums.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums under one key."""
        return {"sums": self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums."""
        self.load_state(state["sums"])


class Metric(Tally, Meter):
    """A tally that reduces to one number. Beside what a `Tally` defines, a subclass defines the meaning of the sums:

    num_sums = 2
    def batch_sums(self, predictions, targets, mask): ...   # on the device, without reading it
    def value(self, sums): ...                              # from the sums on the host
    """

    @abstractmethod
    def value(self, sums: list[float]) -> float:
        """Return the value of the metric from its sums."""

    def compute(self) -> float:
        """Return the value over everything since the last reset; nan if there is nothing. Synchronises."""
        return self.value(self.state().tolist())
