"""Loaders that change the batches of another one: `DeviceLoader` moves them, `TransformedLoader` transforms them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import torch

from etude.core import Batch, BatchIterator, Loader, to_device
from etude.core.random import mix
from etude.data.mixing import BatchTransform


class ChangedLoader(ABC):
    """Passes every batch of another loader through `change`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    @abstractmethod
    def change(self, epoch: int, position: int, batch: Batch) -> Batch:
        """Return what the batch that ends at a position of an epoch becomes."""

    def iterate(self, epoch: int, position: int = 0) -> BatchIterator:
        """Return the batches of an epoch, changed."""
        return _ChangedBatches(self.loader.iterate(epoch, position), partial(self.change, epoch))


class _ChangedBatches:
    def __init__(self, batches: BatchIterator, change: Callable[[int, Batch], Batch]) -> None:
        self._batches, self._change = batches, change

    @property
    def position(self) -> int:
        return self._batches.position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        return self._change(self.position, batch)

    def close(self) -> None:
        self._batches.close()


class DeviceLoader(ChangedLoader):
    """Moves the batches to a device; copies from pinned memory do not wait."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        super().__init__(loader)
        self.device = device

    def change(self, epoch: int, position: int, batch: Batch) -> Batch:  # noqa: ARG002
        """Return the batch on the device."""
        return to_device(batch, self.device)


class TransformedLoader(ChangedLoader):
    """Passes the batches through a batch transform, with random numbers of their own."""

    def __init__(self, loader: Loader, transform: BatchTransform, seed: int) -> None:
        super().__init__(loader)
        self.transform, self.seed = transform, seed

    def change(self, epoch: int, position: int, batch: Batch) -> Batch:
        """Return the transformed batch."""
        return self.transform(batch, Random(mix(mix(self.seed, epoch), position)))
