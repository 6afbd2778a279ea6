"""What one optimizer step leaves behind, still on the device: nothing here has been waited for."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class StepReport:
    """Device-side results of one step. Reading a tensor here waits for the device: only at log points."""

    sums: dict[str, Tensor]
    """Per term, the sum over this rank's micro-batches (detached)."""
    counts: dict[str, Tensor | float]
    """Per term, the count over this rank's micro-batches."""
    norm: Tensor
    """Global norm of the gradient as the backward pass left it, before it is divided and clipped."""
    divisor: Tensor | float
    """What the gradient is divided by to become that of the averaged loss; in fp16 the loss scale is part of it."""
    skipped: Tensor
    """1.0 if the update was not finite and was skipped on the device, else 0.0."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    optional: Set[str] = frozenset()
    """Terms that have no number where nothing was counted."""

    @property
    def grad_norm(self) -> Tensor:
        """Global gradient norm of the averaged loss, before clipping."""
        return self.norm / self.divisor

    def pack(self) -> Tensor:
        """Return all numbers that are on the device as one vector."""
        values = (self.norm, self.skipped, self.divisor, *self.sums.values(), *self.counts.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        if all(tensor.dtype is torch.float32 for tensor in tensors):  # one kernel
            return torch.stack(tensors)
        return torch.stack([tensor.double() for tensor in tensors])

    def unpack(self, packed: Tensor) -> dict[str, Any]:
        """Return the fields of a report like this one from the numbers that `pack` returned for it."""
        norm, skipped, *numbers = packed.unbind()
        left = iter(numbers)
        divisor = next(left) if isinstance(self.divisor, Tensor) else self.divisor
        sums = dict(zip(self.sums, left, strict=False))
        counts = {name: next(left) if isinstance(one, Tensor) else one for name, one in self.counts.items()}
        return {"sums": sums, "counts": counts, "norm": norm, "divisor": divisor, "skipped": skipped}


class Page:
    """The numbers of steps that were replayed one after the other, a row for each."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        """Written again some time: replaced by a copy before that."""


class RecordedReport(StepReport):
    """The report of a step that was recorded once and is replayed; its numbers are taken apart if somebody asks."""

    __slots__ = ("layout", "page", "row")

    def __init__(self, layout: StepReport, page: Page, row: int, lr: float) -> None:
        """`layout` is the report that was recorded; the numbers of this step are in a row of a page."""
        self.layout, self.page, self.row, self.lr, self.optional = layout, page, row, lr, layout.optional

    def __getattr__(self, name: str) -> Any:
        if name not in ("sums", "counts", "norm", "divisor", "skipped"):
            raise AttributeError(name)
        fields = self.layout.unpack(self.page.tensor[self.row].clone())
        for key, value in fields.items():
            setattr(self, key, value)
        return fields[name]


def joined(reports: Sequence[StepReport], *, on_host: bool = False) -> list[StepReport]:
    """Return one report in place of all, each number a vector over the steps, if all are replays of one recording.

    With `on_host` it is read from the device, which takes a single transfer.

    >>> first = StepReport({"loss": torch.tensor(1.0)}, {"loss": 2}, torch.tensor(3.0), 2, torch.tensor(0.0), 0.1)
    >>> page = Page(torch.stack([first.pack(), first.pack() + 1]))
    >>> joined([RecordedReport(first, page, row, 0.1) for row in range(2)])[0].sums["loss"]
    tensor([1., 2.])
    """
    alike = [one for one in reports if isinstance(one, RecordedReport)]
    if len(alike) < len(reports) or any(one.layout is not alike[0].layout for one in alike):
        return [*reports]
    layout = alike[0].layout
    runs: list[tuple[Page, int, int]] = []
    for one in alike:
        if runs and runs[-1][0] is one.page and runs[-1][2] == one.row:
            runs[-1] = (one.page, runs[-1][1], one.row + 1)
        else:
            runs.append((one.page, one.row, one.row + 1))
    block = torch.cat([page.tensor[start:stop] for page, start, stop in runs])
    block = (block.cpu() if on_host else block).t()
    fields = layout.unpack(block)
    for key in ("sums", "counts"):
        fields[key] = {name: _vector(value, block) for name, value in fields[key].items()}
    fields["divisor"] = _vector(fields["divisor"], block)
    return [StepReport(**fields, lr=reports[0].lr, optional=layout.optional)]


def _vector(value: Tensor | float, block: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else block.new_full(block.shape[1:], value, dtype=torch.float64)
