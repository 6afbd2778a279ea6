"""Tables from files: delimited text, and formats that Arrow reads."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from etude.core.errors import DataError
from etude.core.spelling import did_you_mean, shorten
from etude.data.catalog.arrow_lines import ArrowReader, Span, arrow_reader, arrow_values
from etude.data.catalog.codes import Keys
from etude.data.catalog.delimited import (
    PLAIN,
    Block,
    FileLayout,
    NotANumber,
    NumberForm,
    PlainBlock,
    Unread,
    read_blocks,
    read_rest,
)
from etude.data.catalog.table import Kind, Numbers, Table, TableBuilder

ARROW_ROWS = 2**13
MAX_THREADS = 4
T = TypeVar("T")
R = TypeVar("R")
_THOUSANDS = re.compile(r"-?\d{1,3}([,.' ]\d{3})+([.,]\d+)?")


@dataclass(frozen=True, slots=True)
class TableFormat:
    """The format of a file, and its selected columns."""

    delimiter: str | None = None
    encoding: str = "utf-8"
    form: NumberForm = PLAIN
    texts: frozenset[str] = frozenset()
    """Columns that are read as text, even if they look like numbers."""
    exclude: tuple[str, ...] = ()
    target: str | None = None
    standardize: bool = False
    standardize_target: bool = False
    """Whether numbers will be standardised: those of all columns but the target, and those of the target."""
    parquet: bool = False

    def read(self, path: Path, names: Sequence[str] | None, kinds: Mapping[str, Kind] | None = None) -> Table:
        """Read a file: the columns `names`, or all but the excluded ones. `kinds` are their kinds, if known.

        Raises DataError with the location of an invalid value.
        """
        if path.is_dir():
            raise DataError(f"{path} is a folder; pass a file")
        if not path.exists():
            raise DataError(f"{path} does not exist")
        return read_parquet(self, path, names) if self.parquet else read_delimited(self, path, names, kinds)

    def wanted(self, path: Path, there: Sequence[str], names: Sequence[str] | None) -> list[str]:
        """Return the columns to read. Raises DataError for an unknown one."""
        for name in names if names is not None else (*self.exclude, *self.texts):
            if name not in there:
                hint = did_you_mean(name, there) or f" (there are: {shorten(', '.join(there), 200)})"
                raise DataError(f"{path} has no column {name!r}{hint}")
        return [name for name in there if (name not in self.exclude if names is None else name in names)]

    def builder(self, path: Path, kinds: Mapping[str, Kind], expected_rows: int) -> TableBuilder:
        """Return a builder of a table with these columns."""
        relative = [name for name in kinds if (self.standardize_target if name == self.target else self.standardize)]
        return TableBuilder(path, kinds, relative, self.target, expected_rows)


def read_delimited(
    form: TableFormat, path: Path, names: Sequence[str] | None, kinds: Mapping[str, Kind] | None = None
) -> Table:
    """Read a delimited text file. Without `kinds`, the first rows decide whether a column has numbers or text."""
    delimiter = form.delimiter or ("\t" if path.suffix in (".tsv", ".tab") else ",")
    there, blocks = read_blocks(path, delimiter, form.encoding, form.form)
    places = {name: there.index(name) for name in form.wanted(path, there, names)}
    first = next((block for unread in blocks if len((block := unread()).lines)), None)
    if first is None:
        raise DataError(f"{path} has no rows below the line of column names")
    found = _kinds(first, places, form.texts) if kinds is None else {name: kinds[name] for name in places}
    builder = form.builder(path, found, int(1.1 * path.stat().st_size / first.size * len(first.lines)) + 1)
    try:
        _Filling(builder, places, form.encoding).fill(first, blocks)
    except NotANumber as wrong:
        raise DataError(
            f"{path}:{wrong.line}: column {there[wrong.column]!r} holds {shorten(wrong.text)!r}, "
            f"but numbers elsewhere; fix it, or list {there[wrong.column]!r} under categorical"
        ) from None
    return builder.table()


Rows = tuple[Block, Numbers, Keys]
"""Some rows, their numbers and the keys of these."""


class _Filling:
    """Reads the blocks of a file, in several threads, into a table."""

    def __init__(self, builder: TableBuilder, places: Mapping[str, int], encoding: str) -> None:
        """`places` are the wanted columns and their places in the file."""
        self.builder, self.places, self.encoding = builder, places, encoding
        self._numbers = [places[name] for name in builder.number_names]

    def fill(self, first: Block, blocks: Iterator[Unread]) -> None:
        """Add the first block and all others."""
        block: Block | None = first
        self._add(self._rows(first))
        arrow = arrow_reader(
            first.layout, self.encoding, self._numbers, [self.places[name] for name in self.builder.texts]
        )
        if arrow is not None:
            while isinstance(block, PlainBlock) and not self.builder.has_reference:
                block = next((unread() for unread in blocks), None)
                if block is not None:
                    self._add(self._rows(block))
            line = int(block.lines[-1]) + 1 if isinstance(block, PlainBlock) else 1
            if line > 1 and (begin := arrow.begin(line)) is not None:
                blocks = self._fill_fast(arrow, first.layout, begin, line)
        for rows in in_threads(lambda unread: self._rows(unread()), blocks):
            self._add(rows)

    def _fill_fast(self, arrow: ArrowReader, layout: FileLayout, begin: int, line: int) -> Iterator[Unread]:
        """Add what pyarrow reads, from a line on; return the rest, which it does not read as we do."""

        def read(span: Span) -> tuple[Span, Rows | None]:
            block = arrow.read(span)
            return span, None if block is None else self._rows(block)

        for span, rows in in_threads(read, arrow.spans(begin)):
            if rows is None:
                return read_rest(layout, self.encoding, span[0], line)
            rows[0].lines = range(line, line + len(rows[0].lines))
            line = rows[0].lines.stop
            self._add(rows)
        return iter(())

    def _rows(self, block: Block) -> Rows:
        numbers = block.numbers(self._numbers)
        return block, numbers, self.builder.number_keys(numbers)

    def _add(self, rows: Rows) -> None:
        block, numbers, keys = rows
        codes = {name: texts.encode_column(block, self.places[name]) for name, texts in self.builder.texts.items()}
        self.builder.add(numbers, keys, codes, block.lines)


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results of a function for each item, in order; as many threads as torch has work ahead."""
    threads = min(torch.get_num_threads(), MAX_THREADS)
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _kinds(block: Block, places: Mapping[str, int], texts: frozenset[str]) -> dict[str, Kind]:
    """Return the kinds of columns, from their first rows."""
    names = {place: name for name, place in places.items()}
    numbers = [place for place, name in names.items() if name not in texts]
    for rows in (1, None):  # the first row finds most columns of text, and takes no time
        while numbers:
            try:
                block.numbers(numbers, rows)
                break
            except NotANumber as found:
                name = names[found.column]
                if _THOUSANDS.fullmatch(found.text):
                    raise DataError(
                        f"{block.layout.path}:{found.line}: column {name!r} holds {found.text!r}, a number with "
                        f"separators; set thousands (and decimal, if that is a comma), or list {name!r} under "
                        f"categorical"
                    ) from None
                numbers.remove(found.column)
    return {name: "number" if place in numbers else "text" for name, place in places.items()}


def import_parquet() -> tuple[Any, Any]:
    """Return the error class of pyarrow and its module for Parquet; raise DataError if it is not installed."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError("Parquet files need pyarrow: pip install 'etude[data]'") from error
    return ArrowException, parquet


def read_parquet(form: TableFormat, path: Path, names: Sequence[str] | None) -> Table:
    """Read a Parquet file: numbers and booleans as numbers, texts unchanged."""
    ArrowException, parquet = import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            wanted = form.wanted(path, file.schema_arrow.names, names)
            batches = file.iter_batches(batch_size=ARROW_ROWS, columns=wanted)
            return arrow_table(form, path, file.schema_arrow, wanted, batches, file.metadata.num_rows)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())})") from error


def arrow_table(
    form: TableFormat, path: Path, schema: Any, wanted: Sequence[str], batches: Iterable[Any], num_rows: int
) -> Table:
    """Return a table from Arrow record batches. Raises DataError for a type that is neither numbers nor text."""
    import pyarrow as pa

    kinds = {name: _arrow_kind(path, name, schema.field(name).type, form) for name in wanted}
    builder = form.builder(path, kinds, num_rows)
    for batch in batches:
        numbers = np.empty((len(batch), len(builder.number_names)))
        for place, name in enumerate(builder.number_names):
            numbers[:, place] = arrow_values(batch.column(name).cast(pa.float64(), safe=False), np.nan)
        codes = {}
        for name, texts in builder.texts.items():
            column = batch.column(name).cast(pa.string()).dictionary_encode()
            known = [texts.known.setdefault(text, len(texts.known)) for text in column.dictionary.to_pylist()]
            codes[name] = np.array([*known, -1], np.int32)[arrow_values(column.indices, -1)]
        builder.add(numbers, builder.number_keys(numbers), codes)
    return builder.table()


def _arrow_kind(path: Path, name: str, kind: Any, form: TableFormat) -> Kind:
    import pyarrow as pa

    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if name in form.texts or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return "number"
    raise DataError(f"{path}: column {name!r} is of type {kind}, neither numbers nor text; exclude it with exclude")
