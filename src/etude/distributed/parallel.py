"""Wrapping a model for data parallelism, and keeping gradients local while they accumulate."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etude.distributed.world import World


def wrap_data_parallel(model: nn.Module, world: World, device: torch.device) -> nn.Module:
    """Return the model in DistributedDataParallel if there are several ranks, else the model itself."""
    if world.size == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=False)


@contextmanager
def local_gradients(model: nn.Module) -> Iterator[None]:
    """Within this block, backward passes keep their gradients on this rank: for all but the last micro-batch."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield
