"""Loaders made elsewhere (torch's DataLoader, a list of batches, a generator function), used as an Etude loader."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from etude.core.batch import Batch, num_samples
from etude.core.errors import DataError
from etude.core.loader import Loader
from etude.core.random import mix
from etude.data.rng import preserved_rng, seed_generators


class ForeignLoader:
    """Any iterable of batches, or a function that returns one, with an order that can be repeated.

    Each epoch the iteration begins under generators seeded by (seed, epoch): Python's, NumPy's, torch's and those
    the loader or its samplers own, so a shuffle drawn at the start is the same when the epoch is resumed. The
    caller's generators are given back as they were. Resuming in mid-epoch skips the batches already seen; it is
    exact for anything whose order is fixed by those generators and by `set_epoch`. Not covered: augmentations drawn
    inside a torch DataLoader's persistent workers after the first epoch; `etude.data.DataLoader` does those exactly.

    >>> loader = ForeignLoader([torch.zeros(4, 2), torch.ones(3, 2)])
    >>> batches = loader.iterate(epoch=0, position=4)
    >>> next(batches).shape, batches.position
    (torch.Size([3, 2]), 7)
    """

    def __init__(self, source: Any, seed: int = 0, world_size: int = 1) -> None:
        self.source, self.seed, self.world_size = source, seed, world_size
        self._is_used_up = False

    def __len__(self) -> int:
        if isinstance(self.source, Sized):
            return len(self.source)
        raise TypeError(f"a {type(self.source).__name__} does not tell how many batches it has")

    def iterate(self, epoch: int, position: int = 0) -> "ForeignIterator":
        """Return the batches of `epoch` from sample `position` on.

        Raises DataError if the source is an iterator that has been read before.
        """
        if isinstance(self.source, Iterator):
            if self._is_used_up:
                raise DataError(
                    "the data is an iterator, which can be read only once, and another epoch was asked for; "
                    "give a list, a DataLoader or a function that returns a new iterator"
                )
            self._is_used_up = True
        return ForeignIterator(self.source, mix(self.seed, epoch), epoch, position, self.world_size)


class ForeignIterator:
    """One epoch of a foreign loader; `position` counts samples over all ranks, as if every rank had as many."""

    def __init__(self, source: Any, seed: int, epoch: int, position: int, world_size: int) -> None:
        self.position = position
        self._source, self._seed, self._epoch, self._world_size = source, seed, epoch, world_size
        self._batches: Iterator[Batch] | None = None
        self._is_closed = False

    def __iter__(self) -> "ForeignIterator":
        return self

    def __next__(self) -> Batch:
        if self._is_closed:
            raise StopIteration
        batch = self._begin() if self._batches is None else next(self._batches)
        self.position += num_samples(batch) * self._world_size
        return batch

    def close(self) -> None:
        """Let go of the source's iterator (and so of its workers); safe to call twice."""
        if isinstance(self._batches, Generator):
            self._batches.close()
        self._batches, self._is_closed = None, True

    def _begin(self) -> Batch:
        """Start the source's iteration and return its batch at the position.

        The first batch of an epoch is fetched under the seeded generators, since samplers draw their shuffle then.
        Any later one is fetched under the caller's, resumed or not, so that both see the same random numbers.
        """
        with preserved_rng():
            seed_generators(self._seed)
            _set_epoch(self._source, self._epoch, self._seed)
            self._batches = iter(self._source if isinstance(self._source, Iterable) else self._source())
            if self.position == 0:
                first = next(self._batches, None)
                if first is None:
                    raise DataError("the data is empty: the loader gave no batch")
                return first
            self._skip(self._batches)
        return next(self._batches)

    def _skip(self, batches: Iterator[Batch]) -> None:
        seen = 0
        while seen < self.position:
            batch = next(batches, None)
            if batch is None:
                raise DataError(
                    f"cannot resume at sample {self.position}: the loader ends after {seen}; has the data changed?"
                )
            seen += num_samples(batch) * self._world_size
        if seen > self.position:
            raise DataError(
                f"cannot resume at sample {self.position}: a batch of the loader ends at sample {seen}; "
                f"use the batch size and number of ranks of the run that was saved"
            )


def as_loader(source: Any, *, seed: int = 0, world_size: int = 1) -> Loader:
    """Return `source` itself if it is a loader, else wrap an iterable of batches or a function that returns one.

    Raises DataError for things that hold single samples rather than batches.
    """
    if isinstance(source, Loader):
        return source
    is_data = isinstance(source, (Tensor, np.ndarray, Mapping, str, bytes, Dataset)) or (
        isinstance(source, tuple) and any(isinstance(part, (Tensor, np.ndarray)) for part in source)
    )
    if is_data or not (isinstance(source, Iterable) or callable(source)):
        raise DataError(
            f"cannot take batches from a {type(source).__name__}; wrap data in etude's "
            f"DataLoader(data, labels, batch_size) or torch's DataLoader, or give an iterable of batches"
        )
    return ForeignLoader(source, seed, world_size)


def _set_epoch(source: Any, epoch: int, seed: int) -> None:
    """Tell the epoch to whatever takes it, and seed the generators that a torch DataLoader and its samplers own."""
    batch_sampler = getattr(source, "batch_sampler", None)
    parts = (
        source,
        getattr(source, "dataset", None),
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    for part in {id(part): part for part in parts if part is not None}.values():
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
