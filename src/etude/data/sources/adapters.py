"""Third-party loaders (torch's DataLoader, a list of batches, a generator function) as Etude loaders."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from types import MethodType
from typing import Any

from torch.utils.data import (
    BatchSampler as TorchBatchSampler,
    DataLoader as TorchLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from etude.core.batch import Batch, num_samples
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.sources.arrays import is_column
from etude.data.sources.foreign_state import SourceState
from etude.data.sources.rng import RandomStream, owned_generators
from etude.data.sources.worker_process import begin_epoch, begin_workers, end_workers, prepare_workers

TORCH_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""Samplers that draw from the global generators only before their first index."""


class ForeignLoader:
    """Any iterable of batches, or a function that returns one, in a reproducible order.

    Each epoch draws from separate random numbers, seeded by (seed, epoch), in Python's, NumPy's and torch's global
    generators, and in those that the loader, its dataset or its samplers keep as attributes. The caller's generators
    are restored after each batch, so model and data draw independently. Resuming inside an epoch reads the earlier
    batches again and drops them; it is exact if these generators and `set_epoch` determine the data, with or without
    worker processes. A source with its own position state (`state_dict` and `load_state_dict`) continues from that
    instead.

    >>> import torch
    >>> loader = ForeignLoader([torch.zeros(4, 2), torch.ones(3, 2)])
    >>> batches = loader.iterate(epoch=0, position=4)
    >>> next(batches).shape, batches.position
    (torch.Size([3, 2]), 7)
    """

    def __init__(self, source: Any, seed: int = 0, world_size: int = 1) -> None:
        self.source, self.seed, self.world_size = source, seed, world_size
        self._is_used_up = False
        self._state = SourceState(source)
        self._saved: dict[str, Any] = {}
        self._current: Callable[[], ForeignIterator | None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """Return the position state of the source in the current epoch, if it has one; else {}."""
        current = self._current()
        return self._saved if current is None else current.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let `iterate`, called with the epoch and position of this state, continue from it."""
        self._saved = dict(state)

    def __len__(self) -> int:
        if isinstance(self.source, Sized):
            return len(self.source)
        raise TypeError(f"a {type(self.source).__name__} does not define its number of batches")

    def iterate(self, epoch: int, position: int = 0) -> "ForeignIterator":
        """Return the batches of `epoch` from sample `position` on.

        Raises DataError if the source is an iterator that has been read before.
        """
        if isinstance(self.source, Iterator):
            if self._is_used_up:
                raise DataError(
                    "the data is an iterator, which can be read only once, but there is another epoch; pass a "
                    "list, a DataLoader or a function that returns a new iterator"
                )
            self._is_used_up = True
        saved = self._saved
        is_here = (saved.get("epoch"), saved.get("position")) == (epoch, position)
        iterator = ForeignIterator(self, epoch, position, saved if is_here else {})
        self._current = weakref.ref(iterator)
        return iterator

    def keep(self, iterator: "ForeignIterator") -> None:
        """Remember a closed iterator: the end of a run is saved after it."""
        if self._current() is iterator:
            self._current = lambda: iterator


class ForeignIterator:
    """One epoch of a third-party loader; `position` counts samples over all ranks, assuming equal counts."""

    def __init__(self, loader: ForeignLoader, epoch: int, position: int, saved: dict[str, Any]) -> None:
        self.position = position
        self._loader: ForeignLoader | None = loader
        self._source, self._state, self._saved = loader.source, loader._state, saved
        self._seed, self._epoch, self._world_size = mix(loader.seed, epoch), epoch, loader.world_size
        self._batches: Iterator[Batch] | None = None
        self._stream: RandomStream | None = None
        self._is_closed = self._is_at_end = False

    def __iter__(self) -> "ForeignIterator":
        return self

    def __next__(self) -> Batch:
        if self._is_closed:
            raise StopIteration
        try:
            batch = self._next()
        except StopIteration:
            self._is_at_end = True
            raise
        except Exception:
            end_workers(self._source, self._batches)
            raise
        self.position += num_samples(batch) * self._world_size
        return batch

    def _next(self) -> Batch:
        if self._stream is None or self._batches is None:
            return self._begin()
        with self._stream.drawing():
            return next(self._batches)

    def close(self) -> None:
        """Release the source's iterator (and so its workers); safe to call twice."""
        if isinstance(self._batches, Generator) and self._stream is not None:
            with self._stream.drawing():
                self._batches.close()
        self._state.close(self._batches)
        self._batches, self._is_closed = None, True
        if self._loader is not None:
            loader, self._loader = self._loader, None  # no reference cycle, so that it is released at once
            loader.keep(self)

    def state_dict(self) -> dict[str, Any]:
        """Return a state that continues the iteration from here, closed or not; {} at its end, or without a state."""
        if self._stream is None:
            return self._saved
        if self._is_at_end or (self._state.recomputes and self._stream.has_drawn):
            return {}
        source = self._state.now()
        if source is None:
            return {}
        place = {"epoch": self._epoch, "position": self.position}
        return {**place, "source": source, "random": self._stream.state_dict()}

    def _begin(self) -> Batch:
        """Start the source's iteration and return its batch at the position.

        All its draws, also for skipped batches, come from the random numbers of the epoch.
        """
        source, parts = self._source, _parts(self._source)
        self._stream = RandomStream(
            self._seed, owned_generators(*parts), swap_globals=not _draws_only_at_the_start(source)
        )
        with self._stream.drawing():
            begin_epoch(parts, self._epoch)
            saved = self._saved.get("source")
            self._state.begin(self._epoch, saved)
            if isinstance(source, TorchLoader):
                prepare_workers(source, self._epoch, self._seed, watched=self._state.is_kept)
                self._batches = begin_workers(source)
            else:
                self._batches = iter(source if isinstance(source, Iterable) else source())
            self._stream.mark()
            if self._state.follow(self._batches, saved):
                self._stream.load_state_dict(self._saved["random"])
            else:
                self._skip(self._batches)
            try:
                return next(self._batches)
            except StopIteration:
                if self.position == 0 and self._world_size == 1:  # another rank may have all of few samples
                    raise DataError("the data is empty: the loader returned no batch") from None
                raise

    def _skip(self, batches: Iterator[Batch]) -> None:
        seen, batch = 0, None
        while seen < self.position and (batch := next(batches, None)) is not None:
            seen += num_samples(batch) * self._world_size
        if seen != self.position:
            what = "the loader ends after" if batch is None else "a batch of the loader ends at sample"
            raise DataError(
                f"cannot resume at sample {self.position}: {what} {seen}; use the data, batch size and number of ranks "
                "of the saved run"
            )


def check_batches(source: Any) -> None:
    """Raise DataError for things that hold single samples rather than batches."""
    is_pair = isinstance(source, tuple) and any(map(is_column, source))
    is_data = is_pair or is_column(source) or isinstance(source, (Mapping, str, bytes, Dataset))
    if is_data or not (isinstance(source, Iterable) or callable(source)):
        raise DataError(
            f"cannot take batches from a {type(source).__name__}; wrap data in etude's DataLoader(data, labels, "
            "batch_size) or torch's DataLoader, or pass an iterable of batches; pass other arguments by name"
        )


def _parts(source: Any) -> list[Any]:
    """Return the source and other objects that may have a generator or `set_epoch`: dataset, samplers, owner."""
    batch_sampler = getattr(source, "batch_sampler", None)
    parts = (
        source,
        getattr(source, "dataset", None),
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        source.__self__ if isinstance(source, MethodType) else None,
    )
    return list({id(part): part for part in parts if part is not None}.values())


def _draws_only_at_the_start(source: Any) -> bool:
    """Whether the source certainly draws nothing from the global generators after its first batch.

    That saves swapping them for each batch (about 10 µs): for batches in a list, and for torch's own
    samplers with worker processes or with tensors in memory.
    """
    if type(source) in (list, tuple):
        return True
    if type(source) is not TorchLoader:
        return False
    batches = source.batch_sampler
    sampler = (
        batches.sampler if type(batches) is TorchBatchSampler else source.sampler if batches is None else batches
    )
    if source.num_workers:
        return type(sampler) in TORCH_SAMPLERS or isinstance(source.dataset, IterableDataset)
    plain = type(source.dataset) is TensorDataset and source.collate_fn is default_collate
    return plain and type(sampler) in TORCH_SAMPLERS
