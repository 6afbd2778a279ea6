"""A table in memory: columns of numbers and of texts, read from a delimited file or from Parquet."""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from etude.core.errors import DataError
from etude.core.spelling import did_you_mean, shorten
from etude.data.catalog.delimited import BLOCK_BYTES, MISSING, PLAIN, Block, NotANumber, NumberForm, read_blocks
from etude.data.catalog.holdout import mix_keys

Floats = npt.NDArray[np.floating[Any]]
Kind = Literal["number", "text"]
MAX_VALUES = 10_000
"""Different texts of a column at most: more are names or ids, not categories."""
_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
_THOUSANDS = re.compile(r"-?\d{1,3}([,.' ]\d{3})+([.,]\d+)?")


@dataclass(slots=True)
class TextColumn:
    """A column of texts: which of its values each row has, -1 for none."""

    codes: npt.NDArray[np.int32]
    values: list[str]

    def keys(self) -> npt.NDArray[np.uint64]:
        """Return a number for each row that depends on its text only."""
        digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in ("", *self.values))
        keys: npt.NDArray[np.uint64] = np.frombuffer(digests, "<u8").astype(np.uint64)[self.codes + 1]
        return keys


@dataclass(slots=True)
class Table:
    """Columns by name, in the order of the file."""

    path: Path
    columns: dict[str, Floats | TextColumn]
    num_rows: int
    lines: npt.NDArray[np.int64] | None = None
    """The line of each row in its file."""
    _keys: npt.NDArray[np.uint64] | None = None

    def where(self, row: int) -> str:
        """Return the place of a row, for messages."""
        return f"{self.path}, row {row + 1}" if self.lines is None else f"{self.path}:{self.lines[row]}"

    def kinds(self) -> dict[str, Kind]:
        """Return what each column holds."""
        return {name: "text" if isinstance(one, TextColumn) else "number" for name, one in self.columns.items()}

    def row_keys(self) -> npt.NDArray[np.uint64]:
        """Return a random-looking number for each row that depends on its content, not on its place."""
        if self._keys is None:
            keys = np.zeros(self.num_rows, dtype=np.uint64)
            high = np.empty_like(keys)
            for column in self.columns.values():
                keys ^= (
                    column.keys() if isinstance(column, TextColumn) else column.astype("f8", copy=False).view("u8")
                )
                keys *= _ODD
                keys ^= np.right_shift(keys, _HALF, out=high)
            self._keys = mix_keys(keys)
        return self._keys


@dataclass(frozen=True, slots=True)
class TableFormat:
    """How a file is written, and which of its columns are wanted."""

    delimiter: str | None = None
    encoding: str = "utf-8"
    form: NumberForm = PLAIN
    texts: frozenset[str] = frozenset()
    """Columns to be taken as text, even if they look like numbers."""
    exclude: tuple[str, ...] = ()
    parquet: bool = False

    def read(self, path: Path, names: Sequence[str] | None, kinds: Mapping[str, Kind] | None = None) -> Table:
        """Read a file: the columns `names`, or all but the excluded ones. `kinds` says what they hold if that is known.

        Raises DataError with the place of what cannot be.
        """
        if path.is_dir():
            raise DataError(f"{path} is a folder; give a file")
        if not path.exists():
            raise DataError(f"{path} does not exist")
        return read_parquet(self, path, names) if self.parquet else read_delimited(self, path, names, kinds)

    def wanted(self, path: Path, there: Sequence[str], names: Sequence[str] | None) -> list[str]:
        """Return the columns to read. Raises DataError for one that is not there."""
        for name in (
            *(names or ()),
            *(self.exclude if names is None else ()),
            *(self.texts if names is None else ()),
        ):
            if name not in there:
                hint = did_you_mean(name, there) or f" (there are: {shorten(', '.join(there), 200)})"
                raise DataError(f"{path} has no column {name!r}{hint}")
        return [name for name in there if (name not in self.exclude if names is None else name in names)]


class _Numbers:
    """Columns of numbers that grow block by block: float32 as long as that loses nothing."""

    def __init__(self, columns: int, capacity: int) -> None:
        self._array: Floats = np.empty((columns, capacity), np.float32)  # memory that nobody wrote to is not taken
        self._size = 0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        end = self._size + values.shape[1]
        if self._array.dtype == np.float32 and not np.array_equal(values.astype(np.float32), values, equal_nan=True):
            self._grow(self._array.shape[1], np.float64)
        if end > self._array.shape[1]:
            self._grow(end + end // 4, self._array.dtype)
        self._array[:, self._size : end] = values
        self._size = end

    def _grow(self, capacity: int, dtype: Any) -> None:
        larger = np.empty((len(self._array), capacity), dtype)
        larger[:, : self._size] = self._array[:, : self._size]
        self._array = larger

    def column(self, place: int) -> Floats:
        return self._array[place, : self._size]


class _Texts:
    """A column of texts that grows block by block."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.int32]] = []
        self.known: dict[str, int] = {}

    def add(self, texts: Iterable[str]) -> None:
        known = self.known
        codes = [-1 if _is_missing(text) else known.setdefault(text, len(known)) for text in texts]
        self._chunks.append(np.array(codes, dtype=np.int32))

    def column(self) -> TextColumn:
        return TextColumn(np.concatenate(self._chunks), list(self.known))


def _is_missing(text: str) -> bool:
    return not text or (len(text) < 5 and text.lower() in MISSING)


def read_delimited(
    form: TableFormat, path: Path, names: Sequence[str] | None, kinds: Mapping[str, Kind] | None = None
) -> Table:
    """Read a delimited text file. Without `kinds`, the first rows say whether a column has numbers or text."""
    delimiter = form.delimiter or ("\t" if path.suffix in (".tsv", ".tab") else ",")
    there, blocks = read_blocks(path, delimiter, form.encoding, form.form)
    wanted = form.wanted(path, there, names)
    places = {name: there.index(name) for name in wanted}
    found: dict[str, Kind] = dict(kinds or {})
    texts: dict[str, _Texts] = {}
    numbers: _Numbers | None = None
    lines: list[npt.NDArray[np.int64]] = []
    for block in blocks:
        if numbers is None:
            found = found or {
                name: _kind_of(block, place, name, name in form.texts) for name, place in places.items()
            }
            texts = {name: _Texts() for name in wanted if found[name] == "text"}
            number_places = [places[name] for name in wanted if found[name] == "number"]
            numbers = _Numbers(len(number_places), _expected_rows(path, block))
        for name, column in texts.items():
            column.add(block.texts(places[name]))
            _check_values(path, name, column.known)
        try:
            numbers.add(block.numbers(number_places))
        except NotANumber as wrong:
            raise DataError(
                f"{path}:{block.lines[wrong.row]}: column {there[wrong.column]!r} holds {shorten(wrong.text)!r}, "
                f"but numbers elsewhere; fix it, or list {there[wrong.column]!r} under categorical"
            ) from None
        lines.append(block.lines)
    if numbers is None:
        raise DataError(f"{path} has no rows below the line of column names")
    in_order = [name for name in wanted if found[name] == "number"]
    columns = {
        name: texts[name].column() if name in texts else numbers.column(in_order.index(name)) for name in wanted
    }
    return Table(path, columns, sum(map(len, lines)), np.concatenate(lines))


def _expected_rows(path: Path, block: Block) -> int:
    """Return about how many rows a file has, by its first block."""
    return int(1.05 * path.stat().st_size / BLOCK_BYTES * len(block.lines)) + len(block.lines)


def _kind_of(block: Block, place: int, name: str, is_text: bool) -> Kind:
    """Return what a column holds, by its first rows."""
    if is_text:
        return "text"
    try:
        block.numbers([place])
    except NotANumber as found:
        if _THOUSANDS.fullmatch(found.text):
            raise DataError(
                f"{block.layout.path}:{block.lines[found.row]}: column {name!r} holds {found.text!r}, a number with "
                f"separators; set thousands (and decimal, if that is a comma), or list {name!r} under categorical"
            ) from None
        return "text"
    return "number"


def _check_values(path: Path, name: str, values: Collection[str]) -> None:
    if len(values) > MAX_VALUES:
        few = ", ".join(repr(shorten(value)) for value in list(values)[:3])
        raise DataError(
            f"{path}: column {name!r} has more than {MAX_VALUES:,} different texts (such as {few}); "
            f"leave it out with `exclude: [{name}]`, or fix what should be numbers"
        )


def read_parquet(form: TableFormat, path: Path, names: Sequence[str] | None) -> Table:
    """Read a Parquet file: numbers and booleans as numbers, texts as they are."""
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError("Parquet files need pyarrow: pip install 'etude[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            wanted = form.wanted(path, file.schema_arrow.names, names)
            num_rows = file.metadata.num_rows
            # One column after the other: the whole table would be in memory twice.
            columns = {name: arrow_column(path, name, file.read([name]).column(0), form) for name in wanted}
    except (OSError, ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())})") from error
    if not num_rows:
        raise DataError(f"{path} has no rows")
    return Table(path, columns, num_rows)


def arrow_column(path: Path, name: str, column: Any, form: TableFormat) -> Floats | TextColumn:
    """Return a column of an Arrow table. Raises DataError for a type that is neither numbers nor text."""
    import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if is_text or name in form.texts:
        whole = column.cast(pa.string()).combine_chunks()
        texts = whole.dictionary_encode()
        values: Iterable[str] = texts.dictionary.to_pylist()
        codes = texts.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        return TextColumn(codes, list(values))
    if (
        pa.types.is_floating(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    ):
        numbers = column.cast(pa.float64(), safe=False).to_numpy()
        small: Floats = numbers.astype(np.float32)
        return small if np.array_equal(small, numbers, equal_nan=True) else numbers
    raise DataError(
        f"{path}: column {name!r} is of type {column.type}, neither numbers nor text; leave it out with exclude"
    )
