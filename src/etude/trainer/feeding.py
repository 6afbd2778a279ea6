"""Getting batches onto the device: any source of batches becomes a loader whose batches lie where the model is."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from etude.core import Batch, BatchIterator, Loader, to_device
from etude.data import DataLoader, as_loader
from etude.distributed import World
from etude.trainer.config import TrainerConfig
from etude.trainer.sharing import share_source


def make_loader(source: Any, config: TrainerConfig, device: torch.device, world: World, *, training: bool) -> Loader:
    """Return a loader over a loader, a Dataset, a tensor or a pair of tensors.

    Tensors and Datasets are shuffled in training, in the order that seed, epoch and position alone decide.
    """
    if isinstance(source, (Tensor, Dataset)) or _is_tensor_pair(source):
        data, labels = source if isinstance(source, tuple) else (source, None)
        source = DataLoader(
            data,
            labels,
            batch_size=config.batch_size,
            shuffle=training,
            drop_last=training and config.drop_last,
            seed=config.seed,
            device=device,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            persistent_workers=config.persistent_workers,
            prefetch_factor=config.prefetch_factor,
        )
    source = share_source(source, world, training=training)
    loader = as_loader(source, seed=config.seed, world_size=world.size)
    if device.type == "cpu" or (isinstance(loader, DataLoader) and loader.device == device):
        return loader
    return DeviceLoader(loader, device)


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
