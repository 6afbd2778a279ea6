"""A table in memory: one matrix of its numbers, and codes of its texts, filled block by block."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from etude.core.errors import DataError
from etude.core.spelling import shorten
from etude.data.catalog.codes import Codes, Keys, Texts
from etude.data.catalog.delimited import Lines
from etude.data.catalog.holdout import mix_keys

Numbers = npt.NDArray[np.float64]
Kind = Literal["number", "text"]
MAX_VALUES = 10_000
"""Maximum number of distinct texts in a column, unless every row has its own: more are ids, not categories."""
MIN_ROWS = 20
"""With fewer rows, distinct values in each of them prove nothing about a column."""
KEY_NAMES = re.compile(
    r"(?i:unnamed(: ?\d+)?|column_\d+|#|no|nr|id|idx|index|key|guid|uuid|row|(.*[\W_])(id|key))|.*[a-z]I[dD]"
)
"""Names of columns whose distinct integers are row ids."""
_REFERENCE_ROWS = 64
"""The reference is the median of this many values: close to the others, and independent of the blocks."""
_HALF, _ONE = np.uint64(32), np.uint64(1)


@dataclass(slots=True)
class TextColumn:
    """A text column: the code of each row's value, -1 for none."""

    codes: Codes
    values: list[str]


@dataclass(slots=True)
class Table:
    """Columns by name, in file order."""

    path: Path
    names: list[str]
    numbers: npt.NDArray[np.float32]
    """(rows, numeric columns), minus `reference`, so that float32 keeps small differences of large numbers."""
    reference: Numbers
    texts: dict[str, TextColumn]
    keys: Keys
    """A pseudo-random number per row that depends on its content, not on its position."""
    row_names: set[str]
    """Columns with a distinct value in every row that are row ids by their kind or name."""
    row_counts: set[str]
    """Columns that count the rows: 0, 1, 2 …"""
    copies: set[str]
    """Numeric columns that equal the target."""
    lines: list[Lines]
    """The line of each row in its file, block by block; none if it has no lines."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.keys)

    def places(self, names: Iterable[str]) -> list[int]:
        """Return the indices of numeric columns in the matrix."""
        numbers = [name for name in self.names if name not in self.texts]
        return [numbers.index(name) for name in names]

    def where(self, row: int) -> str:
        """Return the location of a row, for messages."""
        if not self.lines:
            return f"{self.path}, row {row + 1}"
        return f"{self.path}:{next(islice(chain.from_iterable(self.lines), row, None))}"

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each column."""
        return {name: "text" if name in self.texts else "number" for name in self.names}


def too_many_texts(path: Path, name: str, values: Sequence[str]) -> DataError:
    """Return the error for a column of too many different texts."""
    few = ", ".join(repr(shorten(value)) for value in values[:3])
    return DataError(
        f"{path}: column {name!r} has {len(values):,} or more different texts (such as {few}), too many categories; "
        f"exclude it with `exclude: [{name}]`, or fix values that should be numbers"
    )


def new_matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Return a matrix that has not been touched: the system allocates its memory only then.

    It is torch's, in pages of the usual size: for NumPy's huge pages the system may have to move other memory first,
    which takes longer than reading the numbers.
    """
    matrix: npt.NDArray[np.float32] = torch.empty(rows, columns, dtype=torch.float32).numpy()
    return matrix


class TableBuilder:
    """Fills a table block by block: only float32 numbers and codes are kept."""

    def __init__(
        self, path: Path, kinds: Mapping[str, Kind], relative: Iterable[str], target: str | None, expected_rows: int
    ) -> None:
        """`kinds` are the kinds of the columns, `relative` marks numbers that will be standardised."""
        self.path, self.kinds = path, kinds
        self.number_names = [name for name, kind in kinds.items() if kind == "number"]
        self.texts = {name: Texts() for name, kind in kinds.items() if kind == "text"}
        self._codes: dict[str, list[Codes]] = {name: [] for name in self.texts}
        self._matrix = new_matrix(expected_rows, len(self.number_names))
        self._reference = np.array([np.nan if name in relative else 0.0 for name in self.number_names])
        factors = mix_keys(np.arange(len(kinds), dtype=np.uint64)) | _ONE
        self._factors = dict(zip(kinds, factors, strict=True))
        self._number_factors = np.array([self._factors[name] for name in self.number_names], np.uint64)
        self._size = 0
        self._keys: list[Keys] = []
        self._lines: list[Lines] = []
        self._names_of_rows = {
            place: list[Numbers]() for place, name in enumerate(self.number_names) if KEY_NAMES.fullmatch(name)
        }
        self._counts = np.arange(len(self.number_names))
        self._target = [place for place, name in enumerate(self.number_names) if name == target]
        self._copies = self._counts[self._counts != self._target] if self._target else self._counts[:0]

    @property
    def has_reference(self) -> bool:
        """Whether all references are known: until then, what they are depends on the size of blocks."""
        return not np.isnan(self._reference).any()

    def number_keys(self, numbers: Numbers) -> Keys:
        """Hash every row: a product per column, its halves combined, and a weighted sum."""
        keys = np.zeros(len(numbers), np.uint64)
        bits, half = np.empty_like(keys), np.empty_like(keys)
        for column, factor in zip(numbers.T.view(np.uint64), self._number_factors, strict=True):
            np.multiply(column, factor, out=bits)
            bits ^= np.right_shift(bits, _HALF, out=half)
            bits *= factor
            keys += bits
        return keys

    def add(
        self,
        numbers: Numbers,
        keys: Keys,
        codes: Mapping[str, Codes],
        lines: Lines | None = None,
    ) -> None:
        """Add rows: numbers (rows, columns) and the keys of these, and codes of every column of texts."""
        if not len(numbers):
            return
        begin, end = self._size, self._size + len(numbers)
        if end > len(self._matrix):
            larger = new_matrix(end + end // 4, self._matrix.shape[1])
            larger[:begin] = self._matrix[:begin]
            self._matrix = larger
        self._look(numbers)
        for place in np.flatnonzero(np.isnan(self._reference)):
            finite = np.sort(numbers[np.isfinite(numbers[:, place]), place][:_REFERENCE_ROWS])
            if size := len(finite):  # np.median would import numpy.ma
                self._reference[place] = finite[(size - 1) // 2 : size // 2 + 1].mean()
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are rejected later
            np.subtract(numbers, np.nan_to_num(self._reference), out=self._matrix[begin:end], casting="same_kind")
        for name, found in codes.items():
            keys += mix_keys(self.texts[name].keys(found)) * self._factors[name]
            self._codes[name].append(found)
            self._check_values(name, end)
        self._keys.append(mix_keys(keys))
        self._lines += [] if lines is None else [lines]
        self._size = end

    def _look(self, numbers: Numbers) -> None:
        """Update which columns count rows or copy the target; keep the numbers of those named like a key."""
        for place, found in self._names_of_rows.items():
            found.append(numbers[:, place].copy())
        if len(self._counts):
            past = numbers[:, self._counts] - np.arange(self._size, self._size + len(numbers))[:, None]
            self._counts = self._counts[((past == past[0]) & ((past == 0) | (past == 1))).all(0)]

        if len(self._copies):
            self._copies = self._copies[(numbers[:, self._copies] == numbers[:, self._target]).all(0)]

    def _check_values(self, name: str, rows: int) -> None:
        if MAX_VALUES < len(self.texts[name].known) != rows:
            raise too_many_texts(self.path, name, list(self.texts[name].known))

    def table(self) -> Table:
        """Return the table. Raises DataError if it has no rows."""
        rows = self._size
        if not rows:
            raise DataError(f"{self.path} has no rows; add some")
        texts = {
            name: TextColumn(np.concatenate(self._codes[name]), list(found.known))
            for name, found in self.texts.items()
        }
        unique = {name for name, column in texts.items() if len(column.values) == rows}
        unique |= {self.number_names[place] for place, found in self._names_of_rows.items() if _tells_apart(found)}
        counts, copies = ({self.number_names[place] for place in found} for found in (self._counts, self._copies))
        return Table(
            self.path,
            list(self.kinds),
            self._matrix[:rows],
            np.nan_to_num(self._reference),
            texts,
            np.concatenate(self._keys),
            row_names=unique if rows >= MIN_ROWS else set(),
            row_counts=counts if rows >= MIN_ROWS else set(),
            copies=copies,
            lines=self._lines,
        )


def _tells_apart(blocks: list[Numbers]) -> bool:
    """Return whether numbers are whole and all different."""
    values = np.concatenate(blocks)
    return bool((values == np.rint(values)).all()) and len(np.unique(values)) == len(values)
