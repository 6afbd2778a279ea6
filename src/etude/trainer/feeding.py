"""Getting batches onto the device: any source of batches becomes a loader whose batches lie where the model is."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from etude.core import Batch, BatchIterator, Loader, to_device
from etude.data import (
    BatchSource,
    DataLoader,
    DataLoaderFactory,
    LoaderData,
    StreamLoader,
    Streams,
    TensorData,
    as_loader,
)
from etude.distributed import World
from etude.trainer.config import TrainerConfig
from etude.trainer.sharing import share_source


def make_loader(source: Any, config: TrainerConfig, device: torch.device, world: World, *, training: bool) -> Loader:
    """Return a loader over a loader, a Dataset, a source of batches, streams, a tensor or a pair of tensors.

    Data that is no loader yet is shuffled in training, in the order that seed, epoch and position alone decide.
    """
    known = (Tensor, Dataset, BatchSource, TensorData, LoaderData, Streams)
    if isinstance(source, known) or _is_tensor_pair(source):
        source = DataLoaderFactory.from_config(config, device=device).create(source, training=training)
    source = share_source(source, world, training=training)
    loader = as_loader(source, seed=config.seed, world_size=world.size)
    if device.type == "cpu" or (isinstance(loader, (DataLoader, StreamLoader)) and loader.device == device):
        return loader
    return DeviceLoader(loader, device)


def num_batches(loader: Loader) -> int | None:
    """Return the batches of an epoch; None if the loader does not know."""
    try:
        return len(loader)
    except TypeError:
        return None


def _is_tensor_pair(source: Any) -> bool:
    return isinstance(source, tuple) and len(source) == 2 and all(isinstance(one, Tensor) for one in source)


class DeviceLoader:
    """Moves the batches of another loader to a device; copies from pinned memory do not wait."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        self.device = device

    def __len__(self) -> int:
        return len(self.loader)

    def iterate(self, epoch: int, position: int = 0) -> BatchIterator:
        """Return the batches of an epoch, on the device."""
        return _DeviceBatches(self.loader.iterate(epoch, position), self.device)


class _DeviceBatches:
    def __init__(self, batches: BatchIterator, device: torch.device) -> None:
        self._batches = batches
        self._device = device

    @property
    def position(self) -> int:
        return self._batches.position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return to_device(next(self._batches), self._device)

    def close(self) -> None:
        self._batches.close()
