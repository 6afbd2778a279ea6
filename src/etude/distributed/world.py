"""The processes of a run: who this one is, and the few things they say to each other.

A single process is a world of size one: every method then returns at once and costs nothing. With several, every
rank must call the same methods in the same order.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from etude.core import errors
from etude.core.errors import EtudeError

T = TypeVar("T")


@dataclass(slots=True)
class World:
    """Rank and size of the run, and reductions over its ranks.

    >>> World().sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this process on its machine."""
    host_group: Any = None
    """A gloo group: it talks between hosts without making a device wait."""
    store: Any = None
    """Where ranks leave notes; it can be used when another rank has failed and the group is broken."""

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks (in place where there are several)."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def host_max(self, values: list[int]) -> list[int]:
        """Return the elementwise maximum over ranks of a few small numbers, through the host."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.host_group)
        return [int(value) for value in tensor.tolist()]

    def gather_bytes(self, tensor: Tensor) -> list[Tensor]:
        """Return the byte tensors of all ranks, in rank order; lengths may differ."""
        if self.size == 1:
            return [tensor]
        length = torch.tensor([tensor.numel()], dtype=torch.int64)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self.host_group)
        sizes = [int(one.item()) for one in lengths]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: tensor.numel()] = tensor
        gathered = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.host_group)
        return [row[:size] for row, size in zip(gathered, sizes, strict=True)]

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        return [bytes(row.tolist()).decode() for row in self.gather_bytes(data)]

    def share_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return self.gather_text(text if self.is_main else "")[0]

    def union(self, names: list[str]) -> list[str]:
        """Return the names that any rank has, in the same order on every rank."""
        return list(dict.fromkeys(name for text in self.gather_text(json.dumps(names)) for name in json.loads(text)))

    def attempt(self, action: Callable[[], T], *, here: bool = True) -> T | None:
        """Run `action` on the ranks where `here` holds; an EtudeError of any of them is raised on every rank.

        So no rank waits for one that has failed. Returns None where the action did not run.
        """
        result, failure = None, None
        try:
            result = action() if here else None
        except EtudeError as error:
            failure = error
        if self.size > 1:
            texts = self.gather_text("" if failure is None else f"{type(failure).__name__}: {failure}")
            first = next((rank for rank, text in enumerate(texts) if text), self.rank)
            failure = failure if first == self.rank else _retold(texts[first])
        if failure is not None:
            raise failure
        return result

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    def claim(self, task: str) -> bool:
        """Return True on one rank only, the first to ask; needs no answer from the others."""
        if self.store is None:
            return True
        try:
            return int(self.store.add(f"etude/{task}", 1)) == 1
        except RuntimeError:  # the process that held the store is gone: better done twice than not at all
            return True


def _retold(text: str) -> EtudeError:
    """Return an error of another rank, which tells it itself."""
    name, _, message = text.partition(": ")
    kind = getattr(errors, name, EtudeError)
    error: EtudeError = kind(message)
    error.told = True
    return error
