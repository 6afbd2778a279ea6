"""The processes of a run: who this one is, and the few things they say to each other.

A single process is a world of size one: every method then returns at once and costs nothing.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.core.errors import ConfigError, TrainingError


@dataclass(slots=True)
class World:
    """Rank and size of the run, and reductions over its ranks.

    >>> World().sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host_group: Any = None
    """A gloo group: it talks between hosts without making a device wait."""

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks (in place where there are several)."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: Tensor) -> Any:
        """Begin a sum over all ranks in place; call `.wait()` on the result before using the tensor."""
        return dist.all_reduce(tensor, async_op=True)

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
        longest = max(int(one.item()) for one in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: tensor.numel()] = tensor
        gathered = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.host_group)
        return [row[: int(one.item())] for row, one in zip(gathered, lengths, strict=True)]

    def share_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        if self.size == 1:
            return text
        payload = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        return bytes(self.gather_bytes(payload)[0].tolist()).decode().rstrip("\0")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    def agree(self, error: str) -> None:
        """Raise on every rank if rank 0 has an error to tell (an empty text means none)."""
        shared = self.share_text(error if self.is_main else "")
        if shared:
            raise TrainingError(shared)


def join_world(device_type: str) -> World:
    """Join the processes that torchrun started, or return a world of one.

    Raises ConfigError if the launcher's variables are incomplete or the group cannot be formed.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    if size == 1:
        return World(local_rank=local_rank)
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"cannot join the {size} processes of this run ({error}); start them with "
                f"`torchrun --nproc-per-node N -m etude train …`"
            ) from error
    host_group = dist.new_group(backend="gloo") if device_type == "cuda" else dist.group.WORLD
    return World(rank, size, local_rank, host_group)


def leave_world() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
