"""What a metric is: sums that stay on the device, one division and one host read when it is asked for."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor


class Meter(ABC):
    """Anything in a list of metrics: a number that can be read, reset, saved and restored."""

    @abstractmethod
    def compute(self) -> float:
        """Return the value over everything since the last reset; nan if there is nothing. Waits for the device."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything seen."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, lists and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""


class Tally(ABC):
    """Counts of predictions and targets whose whole state is one vector of sums.

    Sums of batches, of ranks and of merged tallies add up to the sums of the whole, so what is computed from them never
    depends on how the data was split. A subclass says how many sums there are and what a batch adds.
    """

    num_sums: int
    dtype = torch.int64
    """Of the sums; int64 counts exactly beyond any data set. A subclass that adds real numbers says float64."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @abstractmethod
    def batch_sums(self, predictions: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return what one batch adds to the sums: a vector of `num_sums` on the device of the batch."""

    @torch.no_grad()
    def update(self, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Add one batch; elements where `mask` is zero do not count. Never waits for the device."""
        sums = self.batch_sums(predictions, targets, mask).to(self.dtype)
        if self._sums is not None:
            # Not in place: a sum made under inference_mode may not be changed outside of it.
            sums = self._sums.to(sums.device, non_blocking=sums.is_cuda) + sums
        self._sums = sums

    def reset(self) -> None:
        """Forget everything seen."""
        self._sums = None

    def state(self) -> Tensor:
        """Return a copy of the sums; added up over ranks, they are those of all data."""
        return torch.zeros(self.num_sums, dtype=self.dtype) if self._sums is None else self._sums.clone()

    def load_state(self, sums: Tensor) -> None:
        """Replace the sums, for example by those of all ranks."""
        self._sums = sums.to(self.dtype, copy=True)

    def merge(self, other: Self) -> None:
        """Add what another one of the same kind has seen."""
        sums = self.state()
        self._sums = sums + other.state().to(sums.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums under one key."""
        return {"sums": self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums."""
        self.load_state(state["sums"])


class Metric(Tally, Meter):
    """A tally that comes down to one number. Beside what a `Tally` says, a subclass says what the sums mean:

    num_sums = 2
    def batch_sums(self, predictions, targets, mask): ...   # on the device, without reading it
    def value(self, sums): ...                              # from the sums on the host
    """

    @abstractmethod
    def value(self, sums: list[float]) -> float:
        """Return the value of the metric from its sums."""

    def compute(self) -> float:
        """Return the value over everything since the last reset; nan if there is nothing. Waits for the device."""
        return self.value(self.state().tolist())
