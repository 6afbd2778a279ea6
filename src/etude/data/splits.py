"""The parts of a data set, for training, validation and test, and loaders over them, made with shared settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from etude.core.errors import ConfigError, DataError
from etude.data.loader import DataLoader
from etude.data.parts import LoaderData, Streams, TensorData
from etude.data.sources.arrays import as_tensor
from etude.data.sources.streams_loader import StreamLoader
from etude.data.tokens.schema import TokenSchema

__all__ = ["DataLoaderFactory", "DataSplits", "LoaderData", "SplitName", "TensorData", "check_labels", "make_loader"]

SplitName = Literal["train", "validation", "test"]
WORKERS = ("num_workers", "persistent_workers", "prefetch_factor")
"""Settings of worker processes, which streams do not have."""


@dataclass(frozen=True, slots=True)
class DataSplits:
    """What a data component returns.

    Each part is a `TensorData`, a `LoaderData`, a source, a Dataset, `Streams` of these, or absent.
    """

    train: Any
    validation: Any = None
    test: Any = None
    num_classes: int | None = None
    """A model whose config leaves out `num_classes` or `out_features` is given it."""
    input_shape: tuple[int, ...] | None = None
    """The shape of one sample's input. A model that leaves out `input_shape` or `in_features` is given it."""
    vocab_size: int | None = None
    """Of token data: ids are below this number. A model whose config leaves out `vocab_size` is given it."""
    tokenizer: Path | None = None
    """Of token data: the tokenizer.json that turns ids back into text."""
    token_schema: TokenSchema | None = None
    """Of token data: what ids mean, where a file beside the token files says so."""
    num_types: int | None = None
    """Of token data with a stream `types`: types are below this number. A model that leaves out `n_types` is given
    it."""
    num_targets: int | None = None
    """Where numbers are predicted and no classes: how many per sample. A model that leaves out `out_features` is given
    it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain data that checkpoints keep, such as names of classes and the numbers of a normalisation. A run is resumed
    only with the same `fingerprint`."""

    def __post_init__(self) -> None:
        for part in (self.train, self.validation, self.test):
            if isinstance(part, TensorData) and part.labels is not None and self.num_classes is not None:
                check_labels(part.labels, self.num_classes)

    def model_sizes(self) -> dict[str, Any]:
        """Return what a model is given where its config does not say it, by argument.

        >>> DataSplits(None, num_classes=10, input_shape=(1, 28, 28)).model_sizes()
        {'num_classes': 10, 'input_shape': (1, 28, 28), 'in_features': 784, 'out_features': 10}
        """
        found = {
            "vocab_size": self.vocab_size,
            "n_types": self.num_types,
            "num_classes": self.num_classes,
            "input_shape": self.input_shape,
            "in_features": None if self.input_shape is None else prod(self.input_shape),
            "out_features": self.num_targets if self.num_classes is None else self.num_classes,
        }
        return {name: size for name, size in found.items() if size is not None}

    def make_loader(
        self, split: SplitName, batch_size: int, *, shuffle: bool | None = None, **options: Any
    ) -> DataLoader | StreamLoader:
        """Return a loader over one part; only the training part is shuffled unless `shuffle` says otherwise.

        `options` are those of `DataLoader`. Raises DataError if there is no such part.
        """
        part = {"train": self.train, "validation": self.validation, "test": self.test}.get(split)
        if part is None:
            raise DataError(f"the data has no {split} part")
        shuffle = split == "train" if shuffle is None else shuffle
        return make_loader(part, batch_size, shuffle=shuffle, **options)


def make_loader(
    part: Any, batch_size: int, *, shuffle: bool = True, num_classes: int | None = None, **options: Any
) -> DataLoader | StreamLoader:
    """Return a loader over a part of a data set, a tensor, a source or a Dataset; `options` are `DataLoader`'s.

    Streams are trained on if shuffled, unless `training` says otherwise; `options` are then `StreamLoader`'s.
    Raises DataError if labels are not in range(num_classes).

    >>> part = TensorData(torch.arange(4), torch.tensor([0, 1, 0, 1]))
    >>> len(make_loader(part, 2, num_classes=2))
    2
    """
    if isinstance(part, Streams):
        return StreamLoader(part, batch_size, shuffle=shuffle, **{"training": shuffle, **options})
    if isinstance(part, LoaderData):
        part, options = part.data, {**part.options, **options}
    if not isinstance(part, TensorData):
        return DataLoader(part, batch_size=batch_size, shuffle=shuffle, **options)
    if part.labels is not None and num_classes is not None:
        check_labels(part.labels, num_classes)
    options.setdefault("transform", part.transform)
    return DataLoader(part.data, part.labels, batch_size, shuffle, **options)


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


def check_labels(labels: Any, num_classes: int, ignore_index: int = -100) -> None:
    """Raise DataError unless every label is a class, 0 … num_classes-1, or `ignore_index`.

    Floating-point labels are not classes and pass unchecked.

    >>> check_labels(torch.tensor([0, 9, -100]), num_classes=10)
    """
    labels = as_tensor(labels, "labels")
    if labels.is_floating_point() or labels.numel() == 0:
        return
    lowest, highest = (int(value) for value in labels.aminmax())
    if lowest >= 0 and highest < num_classes:
        return
    values = labels.flatten().to(torch.int64)
    wrong = ((values < 0) | (values >= num_classes)) & (values != ignore_index)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise DataError(
            f"{int(wrong.sum())} labels are out of range: the first is {int(values[place])} (entry {place}), "
            f"but there are {num_classes} classes, numbered from 0; fix the labels or set num_classes"
        )
