"""The parts of a data set for training, validation and test, as tensors, sources or named streams."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from etude.core.errors import DataError
from etude.core.spelling import listed, suggest
from etude.data.sources.arrays import as_tensor, is_column, is_pair
from etude.data.tokens.schema import TokenSchema

if TYPE_CHECKING:
    from etude.data.loader import DataLoader

SplitName = Literal["train", "validation", "test"]
Draw = Literal["alternate", "together"]
RESERVED = ("all", "default", "none")
"""Names that are reserved where streams are named."""


@dataclass(frozen=True, slots=True)
class TensorData:
    """Samples in memory, with the function that prepares a batch."""

    data: Any
    """A tensor, a NumPy array, a table of pandas, or a mapping of them."""
    labels: Any = None
    transform: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.data.values())) if isinstance(self.data, Mapping) else self.data)


@dataclass(frozen=True, slots=True)
class LoaderData:
    """A source, a Dataset or the path of a token file, with its `DataLoader` options."""

    data: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class OtherData:
    """Samples of another file, prepared like those of the training."""

    part: Any
    """A `TensorData`, a `LoaderData`, a source or a Dataset."""
    names: Sequence[str] | None = None
    """The name of each sample, if it has one, such as that of its file."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Named parts from which batches are drawn: each a `TensorData`, a `LoaderData`, a source or a Dataset.

    >>> streams = Streams({"a": TensorData([1, 2, 3]), "b": TensorData([4])}, weights={"a": 1, "b": 3})
    >>> len(streams)
    4

    Raises DataError if there is no stream, or for invalid names and weights.
    """

    parts: Mapping[str, Any]
    weights: Mapping[str, float] | None = None
    """Proportions of training samples, one per stream; by default in proportion to their sizes."""
    draw: Draw = "alternate"
    """`alternate`: every batch has one stream; `together`: every batch has samples of each."""
    epoch_samples: int | None = None
    """Samples per training epoch; by default as many as all streams have."""
    absent: frozenset[str] = frozenset()
    """Streams that the data has, but not in this part: naming them is allowed."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise DataError("there are no streams; add at least one data set under streams")
        for name, part in self.parts.items():
            check_stream_name(name)
            if isinstance(part, Streams):
                raise DataError(f"stream '{name}' consists of streams itself; list its streams directly")
        if self.draw not in get_args(Draw):
            raise DataError(f"draw is {self.draw!r}; it must be {' or '.join(map(repr, get_args(Draw)))}")
        if self.epoch_samples is not None and self.epoch_samples < 1:
            raise DataError(f"epoch_samples is {self.epoch_samples}; it must be at least 1")
        if self.weights is not None:
            check_weights(self.weights, (*self.parts, *self.absent))
            if missing := [name for name in self.parts if name not in self.weights]:
                raise DataError(
                    f"there is no weight for {listed(missing)}; set one for every stream, 0 for those that are read "
                    "only in phases that name them"
                )

    def __len__(self) -> int:
        return self.epoch_samples or sum(len(part) for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class DataSplits:
    """The return value of a data component.

    Each part is a `TensorData`, a `LoaderData`, a source, a Dataset, `Streams` of these, or absent.
    """

    train: Any
    validation: Any = None
    test: Any = None
    num_classes: int | None = None
    """Used for a model whose config omits `num_classes` or `out_features`."""
    input_shape: tuple[int, ...] | None = None
    """The shape of one input sample. Used for a model that omits `input_shape` or `in_features`."""
    vocab_size: int | None = None
    """Token data: all ids are below this number. Used for a model whose config omits `vocab_size`."""
    tokenizer: Path | None = None
    """Token data: the tokenizer.json that decodes ids to text."""
    token_schema: TokenSchema | None = None
    """Token data: the meaning of ids, if a file beside the token files defines it."""
    num_types: int | None = None
    """Token data with a stream `types`: types are below this number. Used for a model that omits `n_types`."""
    num_targets: int | None = None
    """Regression targets per sample, if there are no classes. Used for a model that omits `out_features`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for checkpoints, such as class names. A run is resumed only with the same `fingerprint`."""

    def __post_init__(self) -> None:
        for part in (self.train, self.validation, self.test):
            if isinstance(part, TensorData) and part.labels is not None and self.num_classes is not None:
                check_labels(part.labels, self.num_classes)

    def model_sizes(self) -> dict[str, Any]:
        """Return default arguments of a model, by name.

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
    ) -> "DataLoader":
        """Return a loader over one part; only the training part is shuffled unless `shuffle` is set.

        `options` are those of `DataLoader`. Raises DataError if there is no such part.
        """
        part = {"train": self.train, "validation": self.validation, "test": self.test}.get(split)
        if part is None:
            raise DataError(f"the data has no {split} split")
        from etude.data.factory import make_loader

        shuffle = split == "train" if shuffle is None else shuffle
        return make_loader(part, batch_size, shuffle=shuffle, **options)


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


def tensors_of(
    data: Any, labels: Any, transform: Callable[..., Any] | None
) -> tuple[Any, Any, Callable[..., Any] | None]:
    """Return data, labels and transform of a `TensorData` or a pair of tensors or arrays; anything else unchanged.

    >>> import numpy as np
    >>> tensors_of((np.arange(2), [0, 1]), None, None)
    (array([0, 1]), [0, 1], None)

    Raises DataError for labels given twice, and for parts of a data set with loader settings.
    """
    if isinstance(data, (LoaderData, Streams)):
        raise DataError(f"a {type(data).__name__} has its own loader settings; use DataLoaderFactory().create(data)")
    if is_pair(data):
        data = TensorData(*data)
    if not isinstance(data, TensorData):
        return _samples(data, labels), labels, transform
    if labels is not None and data.labels is not None:
        raise DataError(
            "labels are given twice, with the data and separately; pass a batch size by name: batch_size=8"
        )
    found = labels if data.labels is None else data.labels
    return _samples(data.data, found), found, data.transform if transform is None else transform


def _samples(data: Any, labels: Any) -> Any:
    """Return data; a list of numbers with separate labels is an array, not a data set."""
    is_array = isinstance(data, list) and is_column(data) and is_column(labels)
    return as_tensor(data, "data") if is_array else data


def check_stream_name(name: object) -> None:
    """Raise DataError for a name that has another meaning in config files or metric names."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name):
        raise DataError(f"a stream is named {name!r}; use letters, digits, '_' and '-'")
    if name in RESERVED:
        raise DataError(f"a stream is named '{name}', which is reserved; rename it")


def check_weights(weights: Mapping[str, float], known: Iterable[str]) -> None:
    """Raise DataError unless the weights are of known streams, finite, not negative, and not all zero."""
    names = list(known)
    check_known(weights, names, "weights")
    for name, weight in weights.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or not math.isfinite(weight)
            or weight < 0
        ):
            raise DataError(f"the weight of stream '{name}' is {weight!r}; it must be at least 0")
    if not any(weights.values()):
        raise DataError(f"the weights of {listed(weights)} are all 0; set at least one above 0")


def check_known(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise DataError for an unknown stream, with the closest name."""
    names = list(known)
    for name in given:
        if name not in names:
            raise DataError(f"{where}: unknown stream '{name}'{suggest(str(name), names)}")
