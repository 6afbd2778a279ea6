"""The results of one optimizer step, still on the device: nothing here has been synchronised."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class StepReport:
    """Device-side results of one step. Reading a tensor synchronises with the device, so do it only at log points."""

    sums: dict[str, Tensor]
    """Per term, the sum over this rank's micro-batches (detached)."""
    counts: dict[str, Tensor | float]
    """Per term, the count over this rank's micro-batches."""
    norm: Tensor
    """Global gradient norm right after the backward pass, before division and clipping."""
    divisor: Tensor | float
    """Divisor that turns the gradient into that of the averaged loss; with fp16 it includes the loss scale."""
    skipped: Tensor
    """1.0 if the update was not finite and was skipped on the device, else 0.0."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    optional: Set[str] = frozenset()
    """Terms whose average is undefined when their count is zero."""

    @property
    def grad_norm(self) -> Tensor:
        """Global gradient norm of the averaged loss, before clipping."""
        return self.norm / self.divisor

    def pack(self) -> Tensor:
        """Return all device-side values as one vector."""
        values = (self.norm, self.skipped, self.divisor, *self.sums.values(), *self.counts.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        if all(tensor.dtype is torch.float32 for tensor in tensors):  # one kernel
            return torch.stack(tensors)
        return torch.stack([tensor.double() for tensor in tensors])

    def unpack(self, packed: Tensor) -> dict[str, Any]:
        """Return the fields of a report like this one from the vector that `pack` returned."""
        norm, skipped, *numbers = packed.unbind()
        left = iter(numbers)
        divisor = next(left) if isinstance(self.divisor, Tensor) else self.divisor
        sums = dict(zip(self.sums, left, strict=False))
        counts = {name: next(left) if isinstance(one, Tensor) else one for name, one in self.counts.items()}
        return {"sums": sums, "counts": counts, "norm": norm, "divisor": divisor, "skipped": skipped}


class Page:
    """Values of consecutively replayed steps, one row per step."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        """Reused later for other steps; it is replaced by a copy before that happens."""


class RecordedReport(StepReport):
    """The report of a replayed step; its vector of values is unpacked on first access."""

    __slots__ = ("layout", "page", "row")

    def __init__(self, layout: StepReport, page: Page, row: int, lr: float) -> None:
        """`layout` is the report of the captured step; the values of this step are one row of a page."""
        self.layout, self.page, self.row, self.lr, self.optional = layout, page, row, lr, layout.optional

    def __getattr__(self, name: str) -> Any:
        if name not in ("sums", "counts", "norm", "divisor", "skipped"):
            raise AttributeError(name)
        fields = self.layout.unpack(self.page.tensor[self.row].clone())
        for key, value in fields.items():
            setattr(self, key, value)
        return fields[name]


def joined(reports: Sequence[StepReport], *, on_host: bool = False) -> list[StepReport]:
    """Return one report in place of all, with vectors over the steps, if all are replays of one recording.

    With `on_host` it is copied to the host in a single transfer.

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
