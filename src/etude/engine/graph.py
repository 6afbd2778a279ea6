"""A captured step: it reads its batches from fixed memory and stores its results itself.

Every operation outside the graph costs the host as much as launching the graph. So batches that were moved to the
device together are copied together, and each replay uses the next of them and fills the next row of results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.core import Batch, StepReport
from etude.core.batch import came_together, map_tensors
from etude.core.report import Page, RecordedReport
from etude.engine.recorder import form_of

ROWS = 256
"""Steps whose results are kept before they are copied elsewhere."""
MOST_BYTES = 2**25
"""Tensors that batches are slices of are copied as a whole up to this size."""


class Inputs:
    """The memory from which a captured step reads its batches.

    >>> from etude.core.batch import hand_out_parts
    >>> whole = hand_out_parts(torch.arange(6.0))
    >>> inputs = Inputs([(whole[:2],)])
    >>> for part in (whole[:2], whole[2:4], torch.tensor([7.0, 8.0])):
    ...     inputs.fill([part])
    ...     inputs.read()
    [(tensor([0., 1.]),)]
    [(tensor([2., 3.]),)]
    [(tensor([7., 8.]),)]
    """

    def __init__(self, micro_batches: Sequence[Batch]) -> None:
        tensors: list[Tensor] = []
        form_of(micro_batches, tensors)
        found = _parts(tensors) if len(micro_batches) == 1 else None
        self.number = 1 if found is None else found[0]
        """Number of batches that fit."""
        self._forms = [map_tensors(batch, torch.empty_like) for batch in micro_batches]
        self._memory: list[Tensor] = []
        form_of(self._forms, self._memory)
        if self.number > 1:
            self._memory = [one.new_empty(self.number, *one.shape) for one in self._memory]
        self._wholes: list[Tensor] = []
        """The tensors that were copied into the memory."""
        self._versions: list[int] = []
        self._place = torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
        self._next = -1

    def read(self) -> list[Batch]:
        """Return the batches copied last by `fill`, or the ones after those returned last."""
        if self.number == 1:
            return self._forms
        parts = iter([memory.index_select(0, self._place)[0] for memory in self._memory])
        self._place.add_(1)
        return [map_tensors(form, lambda _: next(parts)) for form in self._forms]

    def fill(self, tensors: list[Tensor]) -> None:
        """Make `read` return these next."""
        if self.number == 1:
            torch._foreach_copy_(self._memory, tensors, non_blocking=True)
            return
        place = self._find(tensors)
        if place is None:
            torch._foreach_copy_([memory[0] for memory in self._memory], tensors, non_blocking=True)
            self._wholes, place = [], 0
        if place != self._next:
            self._place.fill_(place)
        self._next = place + 1

    def again(self) -> "Inputs":
        """Reset the position of `read`, which a recording may have advanced."""
        self._next = -1
        return self

    def _find(self, tensors: list[Tensor]) -> int | None:
        """Return the index of these batches in the memory, after copying all that came with them, or None."""
        place = int(tensors[0].storage_offset()) // tensors[0].numel()
        if self._wholes and all(
            one._base is whole and one._version == version and one.storage_offset() == place * one.numel()
            for one, whole, version in zip(tensors, self._wholes, self._versions, strict=True)
        ):
            return place
        found = _parts(tensors)
        if found is None or found[0] > self.number:
            return None
        number, place = found
        self._wholes = [one._base for one in tensors if one._base is not None]
        self._versions = [one._version for one in tensors]
        rooms = [memory[:number].view(whole.shape) for memory, whole in zip(self._memory, self._wholes, strict=True)]
        torch._foreach_copy_(rooms, self._wholes, non_blocking=True)
        return place


def _parts(tensors: list[Tensor]) -> tuple[int, int] | None:
    """Return the number of equal batches and the index of this one, if each tensor is a slice of a larger one."""
    found = {_part(one) for one in tensors}
    return found.pop() if len(found) == 1 else None


def _part(tensor: Tensor) -> tuple[int, int] | None:
    whole = tensor._base
    if whole is None or not came_together(tensor) or not tensor.numel() or whole.dtype is not tensor.dtype:
        return None
    if whole.storage_offset() or tensor.is_inference():  # changes to such a tensor could not be detected
        return None
    is_plain = tensor.is_contiguous() and whole.is_contiguous() and tensor.shape[1:] == whole.shape[1:]
    number, rest = divmod(whole.numel(), tensor.numel())
    place, between = divmod(int(tensor.storage_offset()), tensor.numel())
    is_small = whole.numel() * whole.element_size() <= MOST_BYTES
    return (number, place) if is_plain and is_small and number > 1 and not rest and not between else None


class Numbers:
    """The memory into which a captured step writes the values of its report: one row per step."""

    def __init__(self, example: Tensor) -> None:
        """`example` holds the values of one step."""
        self._memory = example.new_zeros(ROWS, len(example))
        self._rows = torch.arange(ROWS, device=example.device)[:, None]
        self._row = torch.zeros(1, dtype=torch.int64, device=example.device)
        self._page = Page(self._memory)
        self._next = ROWS

    def write(self, numbers: Tensor) -> None:
        """Write the next row; called inside a recording."""
        torch.where(self._rows == self._row, numbers, self._memory, out=self._memory)
        self._row.add_(1)

    def next(self) -> tuple[Page, int]:
        """Return the location of the next row."""
        if self._next == ROWS:
            self._page.tensor = self._memory.clone()  # reports that have not been read yet
            self._page, self._next = Page(self._memory), 0
            self._row.zero_()
        self._next += 1
        return self._page, self._next - 1


@dataclass(slots=True)
class Graph:
    """One captured step."""

    inputs: Inputs
    numbers: Numbers
    replay: Callable[[], object]
    layout: StepReport
    """The report it was recorded with; its tensors represent columns of a row of `numbers`."""
    is_checked: bool = False

    def run(self, tensors: list[Tensor], lr: float) -> StepReport:
        """Run the step with the tensors of other batches."""
        self.inputs.fill(tensors)
        page, row = self.numbers.next()
        self.replay()
        return RecordedReport(self.layout, page, row, lr)
