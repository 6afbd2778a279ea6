"""Base classes of metrics: sums that stay on the device, one division and one host read in `compute`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from etude.core.errors import CheckpointError, ConfigError
from etude.core.label_range import LabelRange
from etude.distributed import World

PER_CLASS = "_per_class"
"""Ends the name of a metric with one result per class, whose own names have the class in place of it."""


class Meter(ABC):
    """Anything in a list of metrics: a value that can be read, reset, saved and restored."""

    name: str
    """The name of its results in logs: `f1` is `val_f1` in validation."""

    @abstractmethod
    def compute(self) -> Any:
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


class Measure(Meter):
    """A metric of predictions and labels: what `metrics=` of a `Trainer` accepts, once it has been built."""

    name = ""
    own_name = ""
    """Its name where none is given to it, once it has been in a list of metrics."""
    _range: LabelRange | None = None
    """The class labels so far, of metrics that have classes."""

    def check_classes(self, ids: Tensor, size: int, what: str = "targets") -> Tensor:
        """Return class ids below `size`; of others raise DataError at once on the host, on a device in `compute`.

        Ids that do not count must be 0. Does not synchronise.
        """
        if self._range is None:
            self._range = LabelRange()
        who, last = type(self).__name__, size - 1
        words = f"{who}: {what} hold the class {{found}}, but there are {size} classes (0 … {last}); fix the labels"
        self._range.add(ids, 0, last, f"{words}, or set ignore_index if it marks missing ones")
        return ids if ids.is_cpu else ids.clamp(0, last)

    @abstractmethod
    def update(self, predictions: Any, targets: Any) -> None:
        """Add one batch. Does not synchronise."""

    @abstractmethod
    def gather(self, world: World, device: torch.device) -> None:
        """Replace the state by that of all ranks together, which communicate on `device`; all must call this."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Add what another metric of the same kind has seen."""

    def check_labels(self) -> None:
        """Raise DataError if there were labels out of range that could not be noticed before. Synchronises."""
        if self._range is not None:
            self._range.check()

    def results(self) -> dict[str, float]:
        """Return the values to report, by name. Synchronises."""
        return {self.name: self.compute()}

    def files(self) -> Mapping[str, str]:
        """Return files for the run folder at the end of a run: name to text."""
        return {}


class Tally(Measure):
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
        added = self.batch_sums(predictions, targets, mask)
        self.sums_on(added.device).add_(added)

    def sums_on(self, device: torch.device) -> Tensor:
        """Return the sums, moved to a device. They stay the same tensor, so that a recorded update finds them."""
        if self._sums is None or self._sums.device != device:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be changed outside it
                if self._sums is None:
                    self._sums = torch.zeros(self.num_sums, dtype=self.dtype, device=device)
                else:
                    self._sums = self._sums.to(device, non_blocking=device.type == "cuda")
        return self._sums

    def reset(self) -> None:
        """Reset to the initial state."""
        if self._sums is not None:
            self._sums.zero_()
        if self._range is not None:
            self._range.reset()

    def state(self) -> Tensor:
        """Return a copy of the sums; summed over ranks, they are those of all data."""
        return torch.zeros(self.num_sums, dtype=self.dtype) if self._sums is None else self._sums.clone()

    def load_state(self, sums: Tensor) -> None:
        """Replace the sums, for example by those of all ranks."""
        if self._sums is not None and self._sums.numel() == sums.numel():
            self._sums.copy_(sums)
        else:
            self._sums = sums.to(self.dtype, copy=True)

    def merge(self, other: Self) -> None:
        """Add the sums of another tally of the same kind."""
        sums = self.state()
        self.load_state(sums + other.state().to(sums.device))

    def gather(self, world: World, device: torch.device) -> None:
        """Replace the sums by those over all ranks."""
        if world.size > 1:
            self.load_state(world.sum(self.state().to(device)))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums under one key."""
        return {"sums": self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums."""
        sums = state["sums"]
        if sums.shape != (self.num_sums,) or sums.dtype is not self.dtype:
            raise CheckpointError(
                f"{self.name}: the saved sums are {tuple(sums.shape)} {sums.dtype}, not ({self.num_sums},) {self.dtype}"
            )
        self.load_state(sums)


class Metric(Tally):
    """A tally that reduces to one number. Beside what a `Tally` defines, a subclass defines the meaning of the sums:

    num_sums = 2
    def batch_sums(self, predictions, targets, mask): ...   # on the device, without reading it
    def value(self, sums): ...                              # from the sums on the host
    """

    @abstractmethod
    def value(self, sums: list[float]) -> Any:
        """Return the value of the metric from its sums."""

    def compute(self) -> Any:
        """Return the value over everything since the last reset; nan if there is nothing. Synchronises."""
        self.check_labels()
        return self.value(self.state().tolist())


class Kept(Measure):
    """A metric that needs all predictions at once, such as one of ranks: rows of each batch are kept until the end."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        """What is kept of every batch: float32 or float64, one row per sample."""

    def all_rows(self) -> Tensor | None:
        """Return all rows on the host; None if there are none. Synchronises."""
        kept = [rows for rows in self._rows if rows.shape[0]]
        return torch.cat(kept).cpu() if kept else None

    def gather(self, world: World, device: torch.device) -> None:  # noqa: ARG002 - ranks exchange bytes on the host
        """Keep the rows of all ranks."""
        if world.size > 1:
            self._rows = gathered_rows(world, self.all_rows())

    def merge(self, other: Self) -> None:
        """Keep the rows of another metric too."""
        self._rows += other._rows

    def reset(self) -> None:
        """Drop everything that was kept."""
        self._rows = []
        if self._range is not None:
            self._range.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows."""
        rows = self.all_rows()
        return {"rows": [] if rows is None else [rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows."""
        self._rows = list(state["rows"])


def gathered_rows(world: World, rows: Tensor | None) -> list[Tensor]:
    """Return the rows of every rank, on the host; None if this rank has none."""
    columns, is_double = world.host_max([0, 0] if rows is None else [rows.shape[1], int(rows.dtype is torch.float64)])
    dtype = torch.float64 if is_double else torch.float32
    own = torch.empty(0, dtype=dtype) if rows is None else rows.to(dtype).flatten()
    found = world.gather_bytes(own.view(torch.uint8))
    return [one.clone().view(dtype).view(-1, columns) for one in found if one.numel()]


def named_scores(name: str, scores: Sequence[float], class_names: Sequence[str] | None) -> dict[str, float]:
    """Return one result per class: `f1_class0`, or `f1_cat` if the classes have names.

    >>> named_scores("f1", [0.5], ["no", "yes"])
    {'f1_yes': 0.5}
    """
    names = class_names or [f"class{place}" for place in range(len(scores))]
    names = names[1:] if len(scores) == 1 and len(names) == 2 else names  # the score of a binary label: the positive
    name = name.removesuffix(PER_CLASS)
    if len(names) != len(scores):
        raise ConfigError(f"{name}: there are {len(names)} class_names, but {len(scores)} classes; name all of them")
    if len(set(names)) != len(names):
        twice = next(one for place, one in enumerate(names) if one in names[:place])
        raise ConfigError(f"{name}: two classes are named '{twice}' in class_names; rename one")
    return {f"{name}_{one}": score for one, score in zip(names, scores, strict=True)}
