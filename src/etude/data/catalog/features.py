"""From tables to one float32 matrix per part: numbers standardised, categories one-hot, missing values filled."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from etude.core.errors import DataError
from etude.core.spelling import shorten
from etude.data.catalog.holdout import Rows, fingerprint
from etude.data.catalog.screening import MAX_CATEGORIES, report, screen
from etude.data.catalog.table import Kind, Numbers, Table, new_matrix, too_many_texts
from etude.data.catalog.table_files import TableFormat, in_threads
from etude.data.splits import DataSplits, TensorData

Task = Literal["classification", "regression"]
Missing = Literal["error", "mean", "indicator"]
Flags = npt.NDArray[np.bool_]
BLOCK_VALUES = 2**19
"""Numbers per block: with fewer, threads wait for each other between short NumPy calls; more do not fit the cache."""
LONG_ROW = 256


@dataclass(slots=True)
class Part:
    """The rows of a table that make a part of the data."""

    table: Table
    rows: Rows | slice

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.table.num_rows if isinstance(self.rows, slice) else len(self.rows)

    def where(self, place: int) -> str:
        """Return the location of a row in its file."""
        return self.table.where(place if isinstance(self.rows, slice) else int(self.rows[place]))

    def blocks(self) -> list[slice]:
        """Return its rows in blocks."""
        size, rows = self.block_rows, self.num_rows
        return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]

    @property
    def block_rows(self) -> int:
        """The number of rows in a block."""
        columns: int = self.table.numbers.shape[1]
        return max(1, BLOCK_VALUES // max(1, columns))

    def numbers(self, block: slice) -> npt.NDArray[np.float32]:
        """Return all numbers of some of its rows, minus the table's reference."""
        numbers = self.table.numbers
        return numbers[block] if isinstance(self.rows, slice) else numbers.take(self.rows[block], 0)

    def gaps(
        self, block: slice, values: npt.NDArray[np.float32], places: Sequence[int], names: Sequence[str]
    ) -> Flags | None:
        """Return where some columns of a block are missing; None if nothing is missing.

        Raises DataError for infinities.
        """
        if np.isfinite(values).all():
            return None
        values = values[:, places]
        for row, place in np.argwhere(np.isinf(values))[:1].tolist():
            raise DataError(
                f"{self.where(block.start + row)}: column {names[place]!r} is infinite, or too large for "
                f"float32 (3.4e38); fix it, or leave it empty"
            )
        gaps: Flags = np.isnan(values)
        return gaps

    def codes(self, name: str, categories: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the part's values of a text column as indices into `categories`: -1 missing, -2 unknown."""
        column = self.table.texts[name]
        known = {category: place for place, category in enumerate(categories)}
        places = np.array([*(known.get(value, -2) for value in column.values), -1], dtype=np.int64)
        return places[column.codes[self.rows]]


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """How columns become features."""

    target: str
    task: Task | None = None
    missing: Missing = "error"
    unseen: Literal["error", "zeros"] = "error"
    standardize: bool = True
    standardize_target: bool = False
    named: frozenset[str] = frozenset()
    """Columns named by the user, which are always features."""

    def table_format(self, categorical: Sequence[str] | None, exclude: Sequence[str] | None) -> TableFormat:
        """Return how tables are read."""
        classes = [self.target] if self.task == "classification" else []
        return TableFormat(
            texts=frozenset([*(categorical or ()), *classes]),
            exclude=tuple(exclude or ()),
            target=self.target,
            standardize=self.standardize,
            standardize_target=self.standardize_target,
        )


def make_splits(parts: Mapping[str, Part], options: FeatureOptions) -> DataSplits:
    """Return the parts as tensors, with what was computed from the training part as facts."""
    train = parts["train"]
    labels, facts = _labels(parts, options)
    left_out = screen(train.table, options.target, options.named)
    names = [name for name in train.table.names if name != options.target and name not in left_out]
    if not names:
        but = "".join(f" and {name!r} ({reason})" for name, reason in left_out.items())
        raise DataError(
            f"{train.table.path} has no column besides the target {options.target!r}{but}; add a feature column"
        )
    columns = FeatureColumns.fit(train, names, options)
    report(train.table, left_out, columns.constant)
    facts |= {
        "features": columns.features,
        "columns": columns.columns,
        "rows": {part: one.num_rows for part, one in parts.items()},
    }
    facts |= {"left_out": left_out} if left_out else {}
    # Of the input, not of computed values: those may differ in their last digits on another machine.
    content = (one.table.keys[one.rows] for one in parts.values())
    settings = {"options": options, "features": columns.features, "rows": facts["rows"]}
    facts |= {"mean": columns.mean.tolist(), "std": columns.std.tolist()} if options.standardize else {}
    is_classes = "classes" in facts
    with ThreadPoolExecutor(1) as pool:  # hashing keeps one core busy
        digest = pool.submit(fingerprint, content, settings)
        tensors: dict[str, Any] = {
            part: TensorData(torch.from_numpy(columns.matrix(one)), torch.from_numpy(labels[part]))
            for part, one in parts.items()
        }
    return DataSplits(
        **tensors,
        num_classes=len(facts["classes"]) if is_classes else None,
        num_targets=None if is_classes else 1,
        input_shape=(len(columns.features),),
        facts={"fingerprint": digest.result(), **facts},
    )


class FeatureColumns:
    """The features made from columns, and the matrix of a part."""

    def __init__(self, columns: Mapping[str, Any], options: FeatureOptions) -> None:
        """Take the columns as `fit` describes them."""
        self.columns, self._options = columns, options
        self.categories: dict[str, list[str]] = {
            name: one["categories"] for name, one in columns.items() if "categories" in one
        }
        self.numbers = [name for name in columns if name not in self.categories]
        self._indicators = [name for name in self.numbers if columns[name]["indicator"]]
        self.mean, self.std = (
            np.array([columns[name][key] for name in self.numbers], np.float64) for key in ("mean", "std")
        )
        self.std[self.std == 0] = 1.0
        self.features: list[str] = []
        self._places: dict[str, int] = {}
        for name in columns:
            self._places[name] = len(self.features)
            if name in self.categories:
                self.features += [f"{name}={value}" for value in self.categories[name]]
            else:
                self.features += [name, f"{name} is missing"] if name in self._indicators else [name]

    @classmethod
    def fit(cls, train: Part, names: Sequence[str], options: FeatureOptions) -> "FeatureColumns":
        """Return the columns with the categories, means and standard deviations (0 if constant) of a part."""
        table = train.table
        numbers = [name for name in names if name not in table.texts]
        mean, std, count = moments(train, numbers)
        for place in np.flatnonzero(count == 0).tolist():
            raise DataError(
                f"{table.path}: column {numbers[place]!r} has no training values; exclude it with "
                f"`exclude: [{numbers[place]}]`"
            )
        columns: dict[str, Any] = {
            name: {"categories": _categories(table, name)} for name in table.texts if name in names
        }
        for place, name in enumerate(numbers):
            (source,) = table.places([name])
            gaps = options.missing == "indicator" and bool(np.isnan(table.numbers[:, source]).any())
            columns[name] = {"mean": float(mean[place]), "std": float(std[place]), "indicator": gaps}
        return cls({name: columns[name] for name in names}, options)

    @property
    def constant(self) -> list[str]:
        """The columns with the same value in every training row."""
        single = [name for name, values in self.categories.items() if len(values) == 1]
        return [name for name in self.numbers if not self.columns[name]["std"]] + single

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each column."""
        return {name: "text" if name in self.categories else "number" for name in self.columns}

    def matrix(self, part: Part) -> npt.NDArray[np.float32]:
        """Return the features of a part (rows, features). Raises DataError for missing and unseen values."""
        matrix = new_matrix(part.num_rows, len(self.features))
        places, targets = part.table.places(self.numbers), [self._places[name] for name in self.numbers]
        runs = list(_runs(places, targets))
        width = part.table.numbers.shape[1]
        # Short rows are repeated: NumPy takes longer to begin a row than to compute it.
        shift, scale = np.zeros((2, part.block_rows if width < LONG_ROW else 1, width), np.float32)
        scale[:] = 1.0
        if self._options.standardize:
            shift[:, places], scale[:, places] = self.mean - part.table.reference[places], self.std
        filler = np.zeros(len(places)) if self._options.standardize else self.mean
        codes = {name: self._codes(part, name) for name in self.categories}
        # The last two rows are those of codes -2 and -1: no category.
        categories = {
            name: np.eye(len(values) + 2, len(values), dtype=np.float32) for name, values in self.categories.items()
        }

        def write(block: slice) -> None:
            values = part.numbers(block)
            gaps = self._gaps(part, block, values, places)
            values = np.subtract(values, shift[: len(values)])
            values /= scale[: len(values)]
            for source, target in runs:
                matrix[block, target] = values[:, source]
            if gaps is not None:
                for place in np.flatnonzero(gaps.any(0)):
                    matrix[block, targets[place]][gaps[:, place]] = filler[place]
            for name in self._indicators:
                matrix[block, self._places[name] + 1] = 0 if gaps is None else gaps[:, self.numbers.index(name)]
            for name, rows in categories.items():
                begin = self._places[name]
                matrix[block, begin : begin + rows.shape[1]] = rows.take(codes[name][block], 0)

        for _ in in_threads(write, part.blocks()):
            pass
        return matrix

    def _gaps(self, part: Part, block: slice, values: npt.NDArray[np.float32], places: Sequence[int]) -> Flags | None:
        gaps = part.gaps(block, values, places, self.numbers)
        if gaps is not None and self._options.missing == "error" and gaps.any():
            row, place = np.argwhere(gaps)[0].tolist()
            name = self.numbers[place]
            raise DataError(
                f"{part.where(block.start + row)}: column {name!r} has no value; set missing to mean or indicator, "
                f"or exclude the column with `exclude: [{name}]`"
            )
        return gaps

    def _codes(self, part: Part, name: str) -> npt.NDArray[np.int64]:
        """Return the categories of a column. Raises DataError for missing and unseen ones."""
        codes = part.codes(name, self.categories[name])
        lowest = int(codes.min(initial=0))
        if lowest == -2 and self._options.unseen == "error":
            place = int(np.argmin(codes))
            column = part.table.texts[name]
            text = shorten(column.values[column.codes[part.rows][place]])
            raise DataError(
                f"{part.where(place)}: column {name!r} holds {text!r}, which the training file does not have; "
                f"fix it, or set unseen to zeros"
            )
        if lowest < 0 and self._options.missing == "error" and (codes == -1).any():
            raise DataError(
                f"{part.where(int(np.argmax(codes == -1)))}: column {name!r} has no value; set missing to mean (all "
                f"categories 0), or exclude the column with `exclude: [{name}]`"
            )
        return codes


def _categories(table: Table, name: str) -> list[str]:
    values = table.texts[name].values
    if len(values) > MAX_CATEGORIES:
        raise too_many_texts(table.path, name, values)
    return in_order(values)


def moments(part: Part, names: Sequence[str]) -> tuple[Numbers, Numbers, npt.NDArray[np.int64]]:
    """Return mean, standard deviation and count of the values that are present; 0 for constant columns."""
    total, square = np.zeros(len(names)), np.zeros(len(names))
    count = np.full(len(names), part.num_rows)

    places = part.table.places(names)

    def sums(block: slice) -> tuple[Numbers, Numbers, Any]:
        found = part.numbers(block)
        gaps = part.gaps(block, found, places, names)
        values = found.astype(np.float64)
        if gaps is not None:
            np.nan_to_num(values, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        squares = np.einsum("ij,ij->j", values, values)
        return values.sum(0)[places], squares[places], 0 if gaps is None else gaps.sum(0)

    for first, second, absent in in_threads(sums, part.blocks()):
        total, square, count = total + first, square + second, count - absent
    at_least_one = np.maximum(count, 1)
    mean = total / at_least_one
    std = np.sqrt(np.maximum(square / at_least_one - mean * mean, 0.0))
    mean += part.table.reference[places]
    std[std <= 1e-12 * np.maximum(1.0, np.abs(mean))] = 0.0
    return mean, std, count


def _runs(places: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield runs of columns that are adjacent before and after."""
    cuts = np.flatnonzero((np.diff(places) != 1) | (np.diff(targets) != 1)) + 1
    for run in np.split(np.arange(len(places)), cuts) if places else ():
        first, last = run[0], run[-1]
        yield slice(places[first], places[last] + 1), slice(targets[first], targets[last] + 1)


def in_order(values: Sequence[str]) -> list[str]:
    """Return sorted texts, numerically if all of them are numbers.

    >>> in_order(["10", "9", "1"]), in_order(["b", "10", "9"])
    (['1', '9', '10'], ['10', '9', 'b'])
    """
    try:
        return sorted(values, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(values)


def _labels(parts: Mapping[str, Part], options: FeatureOptions) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the labels of each part: classes as int64 (N,), numbers as float32 (N, 1); and facts about them."""
    name, train = options.target, parts["train"]
    facts: dict[str, Any] = {"target": name}
    if name in train.table.texts:
        facts["classes"] = classes = in_order(train.table.texts[name].values)
        if len(classes) < 2:
            raise DataError(
                f"{train.table.path}: the target {name!r} has only one class, {classes}; add rows of others"
            )
    elif options.standardize_target:
        mean, std, _ = moments(train, [name])
        facts |= {"target_mean": float(mean[0]), "target_std": float(std[0]) or 1.0}
    labels = {part: labels_of(one, facts) for part, one in parts.items()}
    if "classes" not in facts and train.num_rows > 1 and (labels["train"] == labels["train"][0]).all():
        raise DataError(f"{train.table.path}: the target {name!r} is the same in every row; choose another target")
    return labels, facts


def labels_of(part: Part, facts: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return the labels of a part, given the facts about the target. Raises DataError for missing and unseen ones."""
    name, classes = facts["target"], facts.get("classes")
    if classes is not None:
        codes = part.codes(name, classes)
        _refuse(part, name, codes == -1, "no value; set one in every row")
        unseen = f"a class that the training file does not have ({shorten(', '.join(classes))})"
        _refuse(part, name, codes == -2, unseen)
        return codes
    (place,) = part.table.places([name])
    found = part.table.numbers[:, place][part.rows][:, None]
    gaps = part.gaps(slice(0, None), found, [0], [name])
    if gaps is not None:
        _refuse(part, name, gaps[:, 0], "no value; set one in every row")
    values: Numbers = found + (part.table.reference[place] - facts.get("target_mean", 0.0))
    return (values / float(facts.get("target_std", 1.0))).astype(np.float32)


def _refuse(part: Part, name: str, wrong: Flags, problem: str) -> None:
    if len(places := np.flatnonzero(wrong)):
        raise DataError(f"{part.where(int(places[0]))}: the target {name!r} has {problem}")
