"""`DataLoaderFactory`: the settings that all loaders of a run share, and the loaders made with them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from etude.core.errors import ConfigError, DataError
from etude.data.loader import DataLoader
from etude.data.parts import LoaderData, Streams, TensorData
from etude.data.splits import make_loader
from etude.data.streams_loader import StreamLoader

WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")
"""Settings of worker processes, which streams do not have."""


@dataclass(frozen=True, slots=True)
class DataLoaderFactory:
    """Makes loaders for training (shuffled) and for evaluation (in order) from the same settings.

    >>> factory = DataLoaderFactory(batch_size=2, seed=7)
    >>> [batch.data.tolist() for batch in factory.create(torch.arange(5), training=False)]
    [[0, 1], [2, 3], [4]]
    """

    batch_size: int = 32
    seed: int = 0
    drop_last: bool = False
    """Leave out the last, smaller batch of a training epoch; in evaluation every sample counts."""
    num_workers: int = 0
    pin_memory: bool | None = None
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    prefetch: int = 0
    device: torch.device | str | None = None
    rank: int = 0
    world_size: int = 1

    @classmethod
    def from_config(cls, config: Any, **settings: Any) -> "DataLoaderFactory":
        """Return a factory with the settings that a mapping or a config object has under these names.

        Keys of the config that are none of a loader's business are left alone; `settings` come first. Raises
        ConfigError if a setting is unknown.

        >>> DataLoaderFactory.from_config({"batch_size": 8, "epochs": 3}, seed=1).batch_size
        8
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(names)):
            raise ConfigError(f"a loader has no setting {', '.join(unknown)}; it has {', '.join(names)}")
        given = config if isinstance(config, Mapping) else vars(config)
        return cls(**{name: given[name] for name in names if name in given} | settings)

    def create(self, data: Any, *, training: bool = True, **options: Any) -> DataLoader | StreamLoader:
        """Return a loader over tensors, a (data, labels) pair, a part of a data set, a source or a Dataset.

        `options` are those of the loader and come before the settings of the factory. Raises DataError if streams
        are to be read by worker processes.
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
                    f"num_workers is {settings['num_workers']}, but streams are read in the process that trains; "
                    f"set it to 0, and prefetch to read ahead in a thread"
                )
            settings = {"training": training} | {k: v for k, v in settings.items() if k not in WORKERS}
        return make_loader(data, **settings)

    def with_settings(self, **settings: Any) -> "DataLoaderFactory":
        """Return a factory with some settings changed."""
        return replace(self, **settings)
