"""Creating loaders: `make_loader` accepts every kind of data."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, overload

import torch

from etude.core.by_epoch import ByEpoch
from etude.core.errors import ConfigError, DataError
from etude.core.loader import Loader
from etude.data.loader import DataLoader, StreamLoader
from etude.data.sources.adapters import ForeignLoader, check_batches
from etude.data.splits import LoaderData, Streams, TensorData, check_labels

WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")
"""Settings of worker processes, which streams do not support."""


@overload
def make_loader(
    source: Any, batch_size: int, *, shuffle: bool = True, num_classes: int | None = None, **options: Any
) -> DataLoader: ...


@overload
def make_loader(source: Any, batch_size: None, *, seed: int = 0, world_size: int = 1) -> Loader: ...


def make_loader(
    source: Any, batch_size: int | None, *, shuffle: bool = True, num_classes: int | None = None, **options: Any
) -> Loader:
    """Return a loader over a part of a data set, a tensor, a source or a Dataset; `options` are `DataLoader`'s.

    Shuffled streams are for training, unless `training` is set; `options` are then `StreamLoader`'s. With
    `batch_size=None` the source already has batches: an iterable of them, or a function that returns one; `options`
    are `seed` and `world_size`. A loader is returned unchanged. Raises DataError if labels are not in
    range(num_classes), and for invalid batches.

    >>> part = TensorData(torch.arange(4), torch.tensor([0, 1, 0, 1]))
    >>> len(make_loader(part, 2, num_classes=2)), len(make_loader([torch.zeros(2)], None))
    (2, 1)
    """
    if batch_size is None:
        if isinstance(source, Loader):
            return source
        check_batches(source)
        return ForeignLoader(source, **options)
    if isinstance(source, Streams):
        return StreamLoader(source, batch_size, shuffle=shuffle, **{"training": shuffle, **options})
    if isinstance(source, LoaderData):
        source, options = source.data, {**source.options, **options}
    labels = None
    if isinstance(source, TensorData):
        if source.labels is not None and num_classes is not None:
            check_labels(source.labels, num_classes)
        options.setdefault("transform", source.transform)
        source, labels = source.data, source.labels
    return DataLoader(source, labels, batch_size, shuffle, **options)


def as_loader(source: Any, *, seed: int = 0, world_size: int = 1) -> Loader:
    """Return `source` itself if it is a loader, else wrap an iterable of batches or a function that returns one.

    Raises DataError for objects that hold single samples rather than batches.
    """
    return make_loader(source, None, seed=seed, world_size=world_size)


@dataclass(frozen=True, slots=True)
class DataLoaderFactory:
    """Creates loaders for training (shuffled) and for evaluation (in order) from the same settings.

    >>> factory = DataLoaderFactory(batch_size=2, seed=7)
    >>> [batch.data.tolist() for batch in factory.create(torch.arange(5), training=False)]
    [[0, 1], [2, 3], [4]]
    """

    batch_size: int | Mapping[int, int] = 32
    """A schedule {epoch: size} is for training; evaluation uses its first size."""
    seed: int = 0
    drop_last: bool = False
    """Drop the last, smaller batch of a training epoch; evaluation always uses every sample."""
    num_workers: int = 0
    pin_memory: bool | None = None
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    prefetch: int | None = None
    device: torch.device | str | None = None
    rank: int = 0
    world_size: int = 1

    @classmethod
    def from_config(cls, config: Any, **settings: Any) -> "DataLoaderFactory":
        """Return a factory with the loader settings of a mapping or a config object.

        Other keys of the config are ignored; `settings` take precedence. Raises ConfigError for an unknown setting.

        >>> DataLoaderFactory.from_config({"batch_size": 8, "epochs": 3}, seed=1).batch_size
        8
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(names)):
            raise ConfigError(f"a loader has no setting {', '.join(unknown)}; it has {', '.join(names)}")
        given = config if isinstance(config, Mapping) else vars(config)
        if (settings.get("batch_size") or given.get("batch_size")) == "auto":
            raise ConfigError("batch_size is auto, which only a Trainer can find out; set a number")
        return cls(**{name: given[name] for name in names if name in given} | settings)

    def create(self, data: Any, *, training: bool = True, **options: Any) -> DataLoader:
        """Return a loader over tensors, a (data, labels) pair, a part of a data set, a source or a Dataset.

        `options` are those of the loader and take precedence over the settings of the factory. Raises DataError for
        streams with worker processes.
        """
        if isinstance(data, tuple) and len(data) == 2:
            data = TensorData(*data)
        elif isinstance(data, LoaderData):
            data, options = data.data, {**data.options, **options}
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        settings |= {"shuffle": training, "drop_last": training and self.drop_last}
        settings |= options
        if isinstance(data, Streams):
            if settings["num_workers"]:
                raise DataError(
                    f"num_workers is {settings['num_workers']}, but streams are read in the training process; set "
                    "it to 0, and use prefetch to read in a thread"
                )
            settings = {"training": training} | {k: v for k, v in settings.items() if k not in WORKERS}
        size: int | Mapping[int, int] = settings.pop("batch_size")
        loader = make_loader(data, ByEpoch("batch_size", size).at(0), **settings)
        return loader.resized(size) if training and isinstance(size, Mapping) else loader
