"""Predictions of a model with several outputs, or with outputs of different lengths, written to a file."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from etude.core import ConfigError
from etude.core.files import replacing

Values = npt.NDArray[Any] | list[npt.NDArray[Any]]
"""A row for each sample; a list if the rows have different shapes."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a model for the samples of a file, in its order, as the model returns them."""

    values: dict[str, Values]
    """By name: `key_inner` of nested mappings, `output_0` of a tuple, the task of several tasks."""
    names: Sequence[str] | None = None
    """The name of each sample, such as that of its file."""

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __str__(self) -> str:
        return f"outputs {', '.join(self.values)}"

    def num_nan(self) -> int:
        """Return how many samples have a NaN among their values."""
        return sum(any(_has_nan(one[row]) for one in self.values.values()) for row in range(len(self)))

    def write(self, path: Path) -> None:
        """Write a .csv, .jsonl or .npz file, complete or not at all; raise ConfigError if they do not fit in it."""
        if path.suffix == ".npy" and len(self.values) > 1:
            raise ConfigError(f"{path} holds one array, but there are {self}; write a .npz or .jsonl file")
        ragged = [name for name, one in self.values.items() if isinstance(one, list)]
        if ragged and path.suffix != ".jsonl":
            raise ConfigError(f"{path}: {ragged[0]} has rows of different shapes; write a .jsonl file")
        header = self._header(path) if path.suffix == ".csv" else []
        try:
            with replacing(path) as file:
                self._write(file, path.suffix, header)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from error

    def _header(self, path: Path) -> list[str]:
        titles = ["file"] * (self.names is not None)
        for name, one in self.values.items():
            table: Any = one
            if table.ndim > 2:
                raise ConfigError(
                    f"{path}: {name} has the shape {table.shape}, more than a row of numbers for each sample; write a "
                    ".npz or .jsonl file"
                )
            is_row = table.ndim == 2 and table.shape[1] != 1
            titles += [f"{name}_{place}" for place in range(table.shape[1])] if is_row else [name]
        if len(set(titles)) < len(titles):
            twice = next(title for place, title in enumerate(titles) if title in titles[:place])
            raise ConfigError(f"{path}: two columns would be named {twice}; write a .npz or .jsonl file")
        return titles

    def _write(self, file: IO[bytes], suffix: str, header: list[str]) -> None:
        arrays: dict[str, Any] = dict(self.values)
        if suffix == ".npy":
            np.save(file, next(iter(arrays.values())))
        elif suffix == ".npz":
            np.savez(file, **arrays)  # type: ignore[arg-type, unused-ignore]
        else:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            if suffix == ".jsonl":
                text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._records())
            else:
                numbers = np.concatenate([one.reshape(len(self), -1).astype(str) for one in arrays.values()], 1)
                writer = csv.writer(text, lineterminator="\n")
                writer.writerow(header)
                first = [[name] for name in self.names] if self.names is not None else [[] for _ in numbers]
                writer.writerows([*name, *row] for name, row in zip(first, numbers.tolist(), strict=True))
            text.detach()

    def _records(self) -> Iterator[dict[str, Any]]:
        for row in range(len(self)):
            named = {} if self.names is None else {"file": self.names[row]}
            yield named | {name: _plain(one[row]) for name, one in self.values.items()}


def as_outputs(output: Any, names: Sequence[str] | None = None) -> Outputs:
    """Return what `Trainer.predict` has returned as named arrays."""
    found: dict[str, Values] = {}
    for name, value in _named(output, ()):
        if name in found:
            raise ConfigError(f"two outputs of the model would be named {name}; rename one")
        found[name] = value.numpy() if isinstance(value, Tensor) else [one.numpy() for one in value]
    return Outputs(found, names)


def _named(output: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(output, (Mapping, tuple)):
        entries = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, value in entries:
            start = () if path or isinstance(output, Mapping) else ("output",)
            yield from _named(value, (*path, *start, str(key)))
    else:
        yield "_".join(path) or "prediction", output


def _has_nan(row: npt.NDArray[Any]) -> bool:
    return bool(np.isnan(row).any())


def _plain(row: Any) -> Any:
    """Return numbers for JSON, which has no NaN and no infinity."""
    array: npt.NDArray[Any] = np.asarray(row)
    if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
        array = array.astype(object)
        array[~finite] = None
    return array.tolist()
