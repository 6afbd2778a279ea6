"""Weights and buffers of rank 0 for all ranks."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.core.buffers import overlaps
from etude.distributed.world import World


def share_weights(model: nn.Module, world: World) -> None:
    """Broadcast the parameters and buffers of rank 0, so that all ranks begin with the same weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel() and not tensor.is_meta:
            share([tensor], world)


def share_buffers(model: nn.Module, world: World) -> None:
    """Broadcast the buffers of rank 0, so that all ranks evaluate the model that is saved."""
    if buffers := [buffer for buffer in model.buffers() if buffer.numel()]:
        share(buffers, world)


@torch.no_grad()
def share(tensors: list[Tensor], world: World) -> None:
    """Broadcast tensors of rank 0 as bytes: gloo does not know all dtypes, nor other layouts."""
    parts = [tensor.detach().flatten().contiguous().view(torch.uint8) for tensor in tensors]
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    world.broadcast(data)
    if world.rank == 0:
        return
    for tensor, part in zip(tensors, torch.split(data, [part.numel() for part in parts]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # the clone is aligned for any dtype


def separate_buffers(model: nn.Module) -> None:
    """Give buffers whose elements share memory, such as expanded ones, their own: they can be written."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer) and overlaps(buffer):
                module._buffers[name] = buffer.contiguous()
