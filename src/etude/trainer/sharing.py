"""Several processes, one source of batches: each process gets its share, or an error says how it could."""

import copy
from typing import Any

from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from etude.core import ConfigError
from etude.data import BatchSampler, DataLoader, StreamLoader
from etude.distributed import World

_WHOLE_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that give every process all samples."""


def share_source(source: Any, world: World, *, training: bool) -> Any:
    """Return a source of batches of which every rank gets its own share.

    An etude DataLoader or StreamLoader is divided here. Of a torch DataLoader this is known by its sampler:
    ConfigError if all ranks would train on the same batches. Other sources are taken to be divided already. Validation
    on undivided batches is exact all the same, as every rank then counts every sample.
    """
    if world.size == 1:
        return source
    if isinstance(source, DataLoader):
        return _divided(source, world)
    if isinstance(source, StreamLoader):
        return source.shared(world.rank, world.size)
    if training and isinstance(source, TorchDataLoader) and _gives_all(source, world):
        raise ConfigError(
            f"each of the {world.size} processes would train on all batches of this torch DataLoader; give the Trainer "
            f"the Dataset itself, an etude DataLoader, or a torch DataLoader with sampler=DistributedSampler(dataset)"
        )
    return source


def _divided(loader: DataLoader, world: World) -> DataLoader:
    found, size = loader.sampler.world_size, loader.batch_size
    if found not in (1, world.size):
        raise ConfigError(f"the DataLoader is made for {found} processes, but there are {world.size}")
    if size < world.size:
        raise ConfigError(
            f"batch_size {size} is that of all processes together: with {world.size} of them it must be at least "
            f"{world.size}, or some would always be idle"
        )
    if found == world.size:
        return loader
    mine = copy.copy(loader)
    mine.sampler = copy.copy(loader.sampler)
    mine.sampler.rank, mine.sampler.world_size = world.rank, world.size
    return mine


def _gives_all(loader: TorchDataLoader[Any], world: World) -> bool:
    batches: Any = loader.batch_sampler
    if isinstance(batches, BatchSampler):
        return batches.world_size != world.size
    if batches is not None and type(batches) is not TorchBatchSampler:
        return False
    return isinstance(loader.sampler if batches is None else batches.sampler, _WHOLE_SAMPLERS)
