"""Map-style datasets: samples fetched in this process or in workers, with the same random numbers."""

import re
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader, Dataset, IterableDataset
from torch.utils.data._utils.collate import collate as collate_by, default_collate_fn_map

from etude.core.batch import Batch, in_pinned_memory, tensors_in, without_samples
from etude.core.errors import DataError
from etude.core.random import mix
from etude.data.order.permutation import Indices
from etude.data.order.sampler import BatchSampler
from etude.data.sources.base import BatchSource
from etude.data.sources.global_rng import GLOBALS, Preserved, seed_generators
from etude.data.sources.rng import owned_generators, seed_owned
from etude.data.sources.worker_process import WorkerStart, begin_workers, end_workers

Collate = Callable[[list[Any]], Batch]
Request = tuple[int, list[int]]
"""A request to a worker: the epoch, and the indices of one batch."""


_RAGGED = re.compile("expects each tensor to be equal size|storage that is not resizable")
"""What torch says about samples of different sizes, the latter in a worker."""


def collate_samples(samples: list[Any]) -> Batch:
    """Return what torch's `default_collate` returns, faster for plain numbers.

    Unlike there, columns of lists of numbers, as in Hugging Face datasets, become one tensor each, as in their torch
    format. Raises DataError for samples that torch cannot collate.
    """
    first = samples[0]
    if isinstance(first, dict) and (lists := [name for name, value in first.items() if _has_numbers(value)]):
        others = collate_samples([{name: one[name] for name in first if name not in lists} for one in samples])
        return {name: _stack(name, samples) if name in lists else others[name] for name in first}
    try:
        return collate_by(samples, collate_fn_map=_COLLATE)
    except TypeError as error:
        if "default_collate" not in str(error):
            raise
        raise DataError(
            f"samples are a {type(samples[0]).__name__}, which torch cannot collate: {error}; pass a collate_fn, or "
            "batches of the library's own loader"
        ) from error
    except RuntimeError as error:
        if not _RAGGED.search(str(error)):
            raise
        columns = (
            {str(tuple(one.shape)) for one in column} for column in zip(*map(tensors_in, samples), strict=False)
        )
        shapes = next((shapes for shapes in columns if len(shapes) > 1), ())
        raise DataError(
            f"samples have tensors of different sizes ({', '.join(sorted(shapes)) or error}), so they cannot be "
            "stacked; pass a collate_fn that pads them, joins them, or keeps them in a list, as models for object "
            "detection expect their labels"
        ) from error


def _has_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, int | float):
            return True
    return False


def _stack(name: str, samples: list[Any]) -> torch.Tensor:
    """Return lists of numbers as a tensor: int64, or float32."""
    try:
        array = np.array([sample[name] for sample in samples])
    except ValueError:
        raise DataError(
            f"the lists {name!r} of a batch have different lengths; pass a collate_fn that pads them"
        ) from None
    if array.dtype.kind not in "biuf":
        raise DataError(f"the lists {name!r} of a batch hold more than numbers; remove them, or pass a collate_fn")
    return torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)


def _collate_numbers(kind: type, samples: Any, *, collate_fn_map: Any = None) -> Any:
    array = np.array(samples)
    if array.dtype == (np.int64 if kind is int else np.float64):
        return torch.from_numpy(array)
    return default_collate_fn_map[kind](samples, collate_fn_map=collate_fn_map)


_COLLATE: dict[Any, Any] = dict(default_collate_fn_map)
_COLLATE |= {kind: partial(_collate_numbers, kind) for kind in (int, float)}


class SeededSamples(Dataset[Batch]):
    """Whole batches of a map-style dataset, by (epoch, indices).

    What a sample draws from the global generators of Python, NumPy and torch is a function of (seed, epoch, index),
    independent of the worker, the rank and earlier samples. The same holds for generators kept by the dataset and the
    collate function.

    Seeding takes longer than fetching a small sample, so only generators that are used are seeded before each sample.
    The first sample shows which. If another one is used later, that batch is fetched again with it seeded too, so a
    sample may be fetched twice. `__getitems__` of a dataset is used as long as nothing is drawn; after that samples
    are fetched one by one.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.collate: Collate = collate_samples if collate is None else collate
        self._whole: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        self._epoch: int | None = None
        self._owned: list[Any] = []
        """Generators kept by the dataset and the collate function when the epoch began."""
        self._unseeded = frozenset(GLOBALS)
        """Global generators that have not been used so far."""
        self._is_first = self._whole is None

    def __getitem__(self, request: Request) -> Batch:
        epoch, indices = request
        if self._epoch != epoch:
            self._epoch, self._owned = epoch, owned_generators(self.dataset, self.collate)
        if indices:
            return self._batch(epoch, indices)
        return without_samples(self._batch(epoch, [0]))

    def _batch(self, epoch: int, indices: list[int]) -> Batch:
        known = [self._first(epoch, indices[0])] if self._is_first else []
        if len(indices) == 1:
            known = []  # collate continues from the generator state of the last sample
        while True:
            with Preserved(self._unseeded) as generators:
                samples = self._samples(epoch, indices[len(known) :] if known else indices)
                batch = self.collate([*known, *samples] if known else samples)
            if not generators.drawn:
                return batch
            self._unseeded, known = self._unseeded.difference(generators.drawn), []

    def _first(self, epoch: int, index: int) -> Any:
        """Return the first sample, fetched with all generators seeded, and find which it uses."""
        with Preserved():
            seed_generators(mix(self.seed, epoch, index))
            with Preserved(GLOBALS) as generators:
                sample = self._sample(epoch, index)
        self._unseeded, self._is_first = self._unseeded.difference(generators.drawn), False
        return sample

    def _samples(self, epoch: int, indices: list[int]) -> Any:
        if self._owned or len(self._unseeded) < len(GLOBALS):
            return [self._sample(epoch, index) for index in indices]
        dataset, whole = self.dataset, self._whole
        return [dataset[index] for index in indices] if whole is None else whole(indices)

    def _sample(self, epoch: int, index: int) -> Any:
        seed = mix(self.seed, epoch, index)
        for name, generator in GLOBALS.items():
            if name not in self._unseeded:
                generator.seed(seed)
        if self._owned:
            seed_owned(self._owned, seed)
        return self.dataset[index]


class SourceSamples(Dataset[Batch]):
    """Whole batches of a source, by (epoch, indices): nothing is drawn, so nothing is seeded."""

    def __init__(self, source: BatchSource, seed: int) -> None:
        self.source, self.seed = source, seed

    def __getitem__(self, request: Request) -> Batch:
        epoch, indices = request
        batch = self.source.gather(np.array(indices or [0], np.int64), epoch=epoch, seed=self.seed)
        return batch if indices else without_samples(batch)


def dataset_length(dataset: Any) -> int:
    """Return the number of samples, or raise DataError if this is not a map-style dataset."""
    if isinstance(dataset, IterableDataset):
        raise DataError("an IterableDataset has no indices; wrap it in torch's DataLoader")
    if isinstance(dataset, bytes) or not isinstance(dataset, Sized):
        raise DataError(
            f"data is a {type(dataset).__name__}; pass a tensor, a NumPy array, a mapping of them, the path of a "
            "token file, or a dataset with a length and indices"
        )
    return len(dataset)


class DatasetSource:
    """Batches of a map-style dataset, or of a source that is read by workers, in the sampler's order.

    Raises DataError for worker settings without workers.
    """

    def __init__(
        self,
        samples: SeededSamples | SourceSamples,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        if prefetch_factor is not None and prefetch_factor < 1:
            raise DataError(f"prefetch_factor is {prefetch_factor}; it must be at least 1")
        given = {"persistent_workers": persistent_workers, "prefetch_factor": prefetch_factor}
        if num_workers == 0 and (names := [name for name, value in given.items() if value]):
            raise DataError(f"{' and '.join(names)} need worker processes; set num_workers, or remove them")
        self.samples, self.pin_memory, self._num_workers = samples, pin_memory, num_workers
        self._settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory, **given}
        self._start = WorkerStart(num_workers) if num_workers else None
        self._persistent: tuple[_Requests, TorchLoader[Batch]] | None = None
        self._turn = 0

    def batches(self, sampler: BatchSampler, epoch: int, position: int) -> Iterator[Batch]:
        """Return the batches of `epoch` from `position` on; workers start immediately."""
        requests = _Requests(sampler, epoch, position)
        if self._num_workers == 0:
            return self._fetch(requests)
        if not self._settings["persistent_workers"]:
            return _begin(self._make_loader(requests))
        if self._persistent is None:
            self._persistent = requests, self._make_loader(requests)
        requests, loader = self._persistent
        requests.sampler, requests.epoch, requests.position = sampler, epoch, position
        self._turn += 1
        return self._follow(_begin(loader), self._turn)

    def _fetch(self, requests: "_Requests") -> Iterator[Batch]:
        for epoch, indices in requests:
            yield self._fetched(epoch, indices)

    def gather(self, indices: Indices, *, epoch: int) -> Batch:
        """Return the samples at `indices`, fetched in this process."""
        return self._fetched(epoch, indices.tolist())

    def _fetched(self, epoch: int, indices: list[int]) -> Batch:
        batch = self.samples[epoch, indices]
        return in_pinned_memory(batch) if self.pin_memory else batch

    def _follow(self, batches: Iterator[Batch], turn: int) -> Iterator[Batch]:
        """Persistent workers serve one epoch at a time: an older iterator raises."""
        while turn == self._turn:
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
        raise DataError(
            "a new iteration has begun over the same persistent workers; finish one before the next, "
            "or set persistent_workers to false"
        )

    def _make_loader(self, requests: "_Requests") -> "TorchLoader[Batch]":
        return TorchLoader(
            self.samples,
            batch_size=None,  # a request is a whole batch
            sampler=requests,
            collate_fn=_unchanged,
            **self._settings,
            worker_init_fn=self._start,
            generator=torch.Generator(),  # otherwise torch draws a seed from the caller's generator
        )


class _Requests:
    """The requests of an epoch from a position on; torch distributes them over the workers."""

    def __init__(self, sampler: BatchSampler, epoch: int, position: int) -> None:
        self.sampler, self.epoch, self.position = sampler, epoch, position

    def __iter__(self) -> Iterator[Request]:
        epoch, position = self.epoch, self.position
        while self.sampler.has_batch(position):
            yield epoch, self.sampler.batch(epoch, position).tolist()
            position = self.sampler.next_position(position)


def _begin(loader: "TorchLoader[Batch]") -> Iterator[Batch]:
    return _until_error(loader, begin_workers(loader))


def _until_error(loader: "TorchLoader[Batch]", batches: Iterator[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    except Exception:
        end_workers(loader, batches)
        raise


def _unchanged(batch: Batch) -> Batch:
    return batch
