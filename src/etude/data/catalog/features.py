"""From tables to one float32 matrix per part: numbers standardised, categories as 0 and 1, missing values filled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from etude.core.errors import DataError
from etude.core.spelling import shorten
from etude.data.catalog.holdout import Rows, fingerprint
from etude.data.catalog.table import Table, TextColumn
from etude.data.splits import DataSplits, TensorData

Task = Literal["classification", "regression"]
Missing = Literal["error", "mean", "indicator"]
MAX_CATEGORIES = 32
"""Of a feature: each of them is a column of the matrix."""


@dataclass(slots=True)
class Part:
    """Rows of a table that make a part of the data."""

    table: Table
    rows: Rows | slice

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return self.table.num_rows if isinstance(self.rows, slice) else len(self.rows)

    def where(self, place: int) -> str:
        """Return the place of a row in its file."""
        return self.table.where(place if isinstance(self.rows, slice) else int(self.rows[place]))

    def numbers(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_] | None]:
        """Return the part's numbers of a column, and where there are none. Raises DataError for infinities."""
        column = self.table.columns[name]
        assert not isinstance(column, TextColumn)
        values = column[self.rows].astype(np.float64)
        if np.isfinite(values).all():
            return values, None
        if len(wrong := np.flatnonzero(np.isinf(values))):
            raise DataError(f"{self.where(int(wrong[0]))}: column {name!r} is infinite; fix it, or leave it empty")
        return values, np.isnan(values)

    def codes(self, name: str, categories: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the part's values of a column of texts as places in `categories`: -1 missing, -2 none of them."""
        column = self.table.columns[name]
        assert isinstance(column, TextColumn)
        known = {category: place for place, category in enumerate(categories)}
        places = np.array([*(known.get(value, -2) for value in column.values), -1], dtype=np.int64)
        return places[column.codes[self.rows]]


class Matrix:
    """A matrix that is filled column by column, several at a time: single columns would touch all of its memory."""

    def __init__(self, rows: int, columns: int) -> None:
        self._matrix = np.empty((rows, columns), np.float32)
        self._waiting = np.empty((min(16, columns), rows), np.float32)
        self._count, self._begin = 0, 0

    def add(self, values: npt.NDArray[Any] | float) -> None:
        """Fill the next column."""
        self._waiting[self._count] = values
        self._count += 1
        if self._count == len(self._waiting):
            self._store()

    def finish(self) -> npt.NDArray[np.float32]:
        """Return the matrix."""
        self._store()
        assert self._begin == self._matrix.shape[1]
        return self._matrix

    def _store(self) -> None:
        begin, end = self._begin, self._begin + self._count
        for row in range(0, len(self._matrix), 2048):
            self._matrix[row : row + 2048, begin:end] = self._waiting[: self._count, row : row + 2048].T
        self._begin, self._count = end, 0


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """How columns become features."""

    target: str
    task: Task | None = None
    missing: Missing = "error"
    unseen: Literal["error", "zeros"] = "error"
    standardize: bool = True
    standardize_target: bool = False


def make_splits(parts: Mapping[str, Part], options: FeatureOptions) -> DataSplits:
    """Return the parts as tensors, with what was computed from the training part as facts."""
    train = parts["train"]
    labels, facts = _labels(parts, options)
    names = [name for name in train.table.columns if name != options.target]
    if not names:
        raise DataError(
            f"{train.table.path} has no column besides the target {options.target!r}; there is nothing to learn from"
        )
    features = [feature for name in names for feature in _names_of(parts, name, options)]
    matrices = {part: Matrix(one.num_rows, len(features)) for part, one in parts.items()}
    means, stds = {}, {}
    for name in names:
        if isinstance(column := train.table.columns[name], TextColumn):
            for part, one in parts.items():
                _one_hot(one, name, matrices[part], in_order(column.values), options)
        else:
            means[name], stds[name] = _numbers(parts, name, matrices, options)
    facts |= {"features": features, "rows": {part: one.num_rows for part, one in parts.items()}}
    # Of what was read, not of what was computed: that may differ in its last digits on another machine.
    content = (one.table.row_keys()[one.rows] for one in parts.values())
    digest = fingerprint(content, {"options": options, "features": features, "rows": facts["rows"]})
    facts |= {"mean": list(means.values()), "std": list(stds.values())} if options.standardize else {}
    is_classes = "classes" in facts
    tensors: dict[str, Any] = {
        part: TensorData(torch.from_numpy(matrices[part].finish()), torch.from_numpy(labels[part])) for part in parts
    }
    return DataSplits(
        **tensors,
        num_classes=len(facts["classes"]) if is_classes else None,
        num_targets=None if is_classes else 1,
        input_shape=(len(features),),
        facts={"fingerprint": digest, **facts},
    )


def _names_of(parts: Mapping[str, Part], name: str, options: FeatureOptions) -> list[str]:
    """Return the features that a column becomes."""
    column = parts["train"].table.columns[name]
    if not isinstance(column, TextColumn):
        add = options.missing == "indicator" and bool(np.isnan(column).any())
        return [name, f"{name} is missing"] if add else [name]
    if len(column.values) > MAX_CATEGORIES:
        few = ", ".join(repr(shorten(value)) for value in column.values[:3])
        raise DataError(
            f"{parts['train'].table.path}: column {name!r} has {len(column.values)} different texts (such as {few}); a "
            f"category takes at most {MAX_CATEGORIES}: leave it out with `exclude: [{name}]`, or fix what should be "
            f"numbers"
        )
    return [f"{name}={value}" for value in in_order(column.values)]


def in_order(values: Sequence[str]) -> list[str]:
    """Return texts sorted, by their value if all of them are numbers.

    >>> in_order(["10", "9", "1"]), in_order(["b", "10", "9"])
    (['1', '9', '10'], ['10', '9', 'b'])
    """
    try:
        return sorted(values, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(values)


def _numbers(
    parts: Mapping[str, Part], name: str, matrices: Mapping[str, Matrix], options: FeatureOptions
) -> tuple[float, float]:
    """Write a column of numbers into the matrices; return mean and standard deviation of the training part."""
    found = {part: one.numbers(name) for part, one in parts.items()}
    mean, std = _moments(*found["train"], parts["train"], name)
    has_indicator = len(_names_of(parts, name, options)) == 2
    for part, (values, gaps) in found.items():
        if gaps is not None:
            if options.missing == "error":
                raise DataError(
                    f"{parts[part].where(int(np.flatnonzero(gaps)[0]))}: column {name!r} has no value; "
                    f"set missing to mean or indicator, or leave the column out with `exclude: [{name}]`"
                )
            values[gaps] = mean
        if options.standardize:
            values -= mean
            values /= std
        matrices[part].add(values)
        if has_indicator:
            matrices[part].add(0.0 if gaps is None else gaps)
    return mean, std


def _moments(
    values: npt.NDArray[np.float64], gaps: npt.NDArray[np.bool_] | None, part: Part, name: str
) -> tuple[float, float]:
    """Return mean and standard deviation of the values that are there; 1 where they are all the same."""
    there = values if gaps is None else values[~gaps]
    if not len(there):
        raise DataError(
            f"{part.table.path}: column {name!r} has no value to train on; leave it out with `exclude: [{name}]`"
        )
    mean, std = float(there.mean()), float(there.std())
    return mean, std if std > 1e-12 * max(1.0, abs(mean)) else 1.0


def _one_hot(part: Part, name: str, matrix: Matrix, categories: Sequence[str], options: FeatureOptions) -> None:
    codes = part.codes(name, categories)
    problems = {-1: options.missing == "error", -2: options.unseen == "error"}
    for code, is_error in problems.items():
        if is_error and len(wrong := np.flatnonzero(codes == code)):
            place = int(wrong[0])
            if code == -1:
                raise DataError(
                    f"{part.where(place)}: column {name!r} has no value; set missing to mean (all categories 0), or "
                    f"leave the column out with `exclude: [{name}]`"
                )
            raise DataError(
                f"{part.where(place)}: column {name!r} holds {_text(part, name, place)!r}, which the training file "
                f"does not have; fix it, or set unseen to zeros"
            )
    for code in range(len(categories)):
        matrix.add(codes == code)


def _text(part: Part, name: str, place: int) -> str:
    column = part.table.columns[name]
    assert isinstance(column, TextColumn)
    return shorten(column.values[column.codes[part.rows][place]])


def _labels(parts: Mapping[str, Part], options: FeatureOptions) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the labels of each part: classes as int64 (N,), numbers as float32 (N, 1); and facts about them."""
    name, train = options.target, parts["train"]
    column = train.table.columns[name]
    if isinstance(column, TextColumn):
        classes = in_order(column.values)
        if len(classes) < 2:
            raise DataError(
                f"{train.table.path}: the target {name!r} has one class, {classes}; there is nothing to learn"
            )
        labels: dict[str, npt.NDArray[Any]] = {part: one.codes(name, classes) for part, one in parts.items()}
        for part, codes in labels.items():
            _refuse(parts[part], name, codes == -1, "no value; every row needs one")
            _refuse(
                parts[part],
                name,
                codes == -2,
                f"a class that the training file does not have ({shorten(', '.join(classes))})",
            )
        return labels, {"target": name, "classes": classes}
    facts: dict[str, Any] = {"target": name}
    labels = {}
    mean, std = 0.0, 1.0
    if options.standardize_target:
        mean, std = _moments(*train.numbers(name), train, name)
        facts |= {"target_mean": mean, "target_std": std}
    for part, one in parts.items():
        values, gaps = one.numbers(name)
        if gaps is not None:
            _refuse(one, name, gaps, "no value; every row needs one")
        labels[part] = ((values - mean) / std).astype(np.float32)[:, None]
    return labels, facts


def _refuse(part: Part, name: str, wrong: npt.NDArray[np.bool_], problem: str) -> None:
    if len(places := np.flatnonzero(wrong)):
        raise DataError(f"{part.where(int(places[0]))}: the target {name!r} has {problem}")
