"""Rows of a delimited text file, in blocks: plain ones as arrays, those with quotes through Python's csv module."""

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from etude.core.errors import DataError
from etude.core.spelling import shorten
from etude.data.catalog.decimals import PADDING, DecimalParser, Numbers, Places, Words

BLOCK_BYTES = 2**20
QUOTED_ROWS = 4096
"""Rows per block with quotes."""
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none"))
"""Texts that mean a missing value, in any letter case."""


@dataclass(frozen=True, slots=True)
class NumberForm:
    """The number format of a file."""

    decimal: str = "."
    thousands: str | None = None

    def plain(self, text: str) -> str:
        """Return the text as Python writes numbers.

        >>> NumberForm(decimal=",", thousands=".").plain("1.234,5")
        '1234.5'
        """
        text = text.replace(self.thousands, "") if self.thousands else text
        return text if self.decimal == "." else text.replace(self.decimal, ".")


PLAIN = NumberForm()


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file and its format."""

    path: Path
    delimiter: str
    form: NumberForm
    columns: int


Lines = range | npt.NDArray[np.int64]


class Block:
    """Some rows of a file."""

    def __init__(self, layout: FileLayout, lines: Lines, size: int) -> None:
        """`lines` are the line numbers of the rows, from 1; `size` is the approximate text size in bytes."""
        self.layout, self.lines, self.size = layout, lines, size

    def texts(self, column: int, rows: Sequence[int] | None = None) -> list[str]:
        """Return a column as stripped text; all rows, or some."""
        raise NotImplementedError

    def words(self, column: int) -> Words | None:  # noqa: ARG002
        """Return a column of short texts as machine words (words, rows), last characters first, or None."""
        return None

    def categories(self, column: int) -> tuple[Places, list[str]] | None:  # noqa: ARG002
        """Return a column as indices into a list of its texts; None if they are unknown."""
        return None

    def numbers(self, columns: Sequence[int], count: int | None = None) -> Numbers:
        """Return columns of all rows, or of the first `count`, as numbers (rows, columns), NaN for missing ones.

        Raises NotANumber for other text.
        """
        rows = range(len(self.lines))[:count]
        found = [self._floats(self.texts(column, rows), rows, repeat(column)) for column in columns]
        return np.array(found, np.float64).reshape(len(columns), len(rows)).T.copy()

    def _floats(self, texts: Sequence[str], rows: Iterable[int], columns: Iterable[int]) -> list[float]:
        """Return numbers parsed by Python one by one."""
        if self.layout.form == PLAIN and "_" not in "".join(texts):  # Python would parse 1_000 as a number
            try:
                return [float("nan" if text.lower() in MISSING else text) for text in texts]
            except ValueError:
                pass
        return [self._number(*cell) for cell in zip(texts, rows, columns, strict=False)]

    def _number(self, text: str, row: int, column: int) -> float:
        if text.lower() in MISSING:
            return float("nan")
        try:
            if "_" in text:
                raise ValueError
            return float(self.layout.form.plain(text))
        except ValueError:
            raise NotANumber(int(self.lines[row]), column, text) from None


Unread = Callable[[], Block]
"""Some rows of a file, read when this is called, in any thread."""


class NotANumber(Exception):
    """A text where a number was expected: its line, column, and the text."""

    def __init__(self, line: int, column: int, text: str) -> None:
        super().__init__(text)
        self.line, self.column, self.text = line, column, text


class PlainBlock(Block):
    """Rows without quotes: the start and end of each cell."""

    def __init__(
        self, layout: FileLayout, buffer: bytes, first_line: int, cells: "Cells", parser: DecimalParser
    ) -> None:
        self.buffer, self._cells, self._parser = buffer, cells, parser
        super().__init__(layout, range(first_line, first_line + len(cells[0])), len(buffer))

    def texts(self, column: int, rows: Sequence[int] | None = None) -> list[str]:
        """Return a column as text."""
        starts, ends, _ = (places[:, column] if rows is None else places[rows, column] for places in self._cells)
        return [
            self.buffer[start:end].decode().strip() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def words(self, column: int) -> Words | None:
        """Return a column of short texts as machine words."""
        if b"\0" in self.buffer:  # the filler of shorter texts
            return None
        starts, ends, _ = self._cells
        return self._parser.words(np.frombuffer(self.buffer, "<u8"), starts[:, column], ends[:, column])

    def numbers(self, columns: Sequence[int], count: int | None = None) -> Numbers:
        """Return columns as numbers: parsed at once, except those of another form."""
        begin, end = min(columns, default=0), max(columns, default=-1) + 1
        # Parsing some texts between the numbers in vain is faster than copying the cell positions.
        is_most = 4 * len(columns) > 3 * (end - begin)
        chosen: slice | list[int] = slice(begin, end) if is_most else list(columns)
        starts, ends, decimals = (places[:count, chosen] for places in self._cells)
        text, shape = np.frombuffer(self.buffer, "<u8"), starts.shape
        values, bad = self._parser.parse(text, starts.reshape(-1), ends.reshape(-1), decimals.reshape(-1))
        values, bad = values.reshape(shape), bad.reshape(shape)
        if is_most and len(columns) < end - begin:
            kept = np.subtract(columns, begin)
            values, bad = values.take(kept, 1), bad.take(kept, 1)
        if bad.any():
            rows, places = np.divmod(np.flatnonzero(bad), len(columns))
            values[rows, places] = self._others(rows, np.take(columns, places))
        return values

    def _others(self, rows: Places, columns: Places) -> Numbers:
        """Return the numbers of cells that the parser skips: empty ones, exponents, surrounding spaces …"""
        starts, ends, _ = (places[rows, columns] for places in self._cells)
        values = np.full(len(rows), np.nan)
        some = np.flatnonzero(ends > starts)
        bounds = zip(starts[some].tolist(), ends[some].tolist(), strict=True)
        texts = [self.buffer[start:end].decode().strip() for start, end in bounds]
        values[some] = self._floats(texts, rows[some].tolist(), columns[some].tolist())
        return values


Cells = tuple[Places, Places, Places]
"""Of every cell (rows, columns): where it begins, where it ends, how many characters follow its decimal point (all of
them where there is none)."""


def find_cells(layout: FileLayout, buffer: bytes) -> Cells | None:
    """Return the cells of text after PADDING bytes; None unless every line has exactly all columns."""
    text, point = np.frombuffer(buffer, np.uint8), ord(layout.form.decimal)
    is_mark = text == ord("\n")
    rows = np.count_nonzero(is_mark)
    is_mark |= text == ord(layout.delimiter)
    is_mark |= text == point
    marks = np.flatnonzero(is_mark)
    at = np.flatnonzero(text.take(marks) != point)
    ends = marks.take(at)
    shape = rows, layout.columns
    if len(ends) != rows * layout.columns or (text.take(ends.reshape(shape)[:, -1]) != ord("\n")).any():
        return None
    starts = np.empty_like(ends)
    starts[0], starts[1:] = PADDING, ends[:-1]
    starts[1:] += 1
    at -= 1
    decimals = ends - marks.take(at, mode="clip")
    decimals -= 1
    decimals[0] = min(decimals[0], ends[0] - PADDING) if at[0] >= 0 else ends[0] - PADDING
    return starts.reshape(shape), ends.reshape(shape), decimals.reshape(shape)


class QuotedBlock(Block):
    """Rows that the csv module has read, with the line of each."""

    def __init__(self, layout: FileLayout, rows: Sequence[Sequence[str]], lines: Sequence[int]) -> None:
        super().__init__(layout, np.array(lines, dtype=np.int64), sum(len(text) + 1 for row in rows for text in row))
        self.rows = rows

    def texts(self, column: int, rows: Sequence[int] | None = None) -> list[str]:
        """Return a column as text."""
        return [row[column].strip() for row in (self.rows if rows is None else [self.rows[place] for place in rows])]


def read_blocks(
    path: Path, delimiter: str, encoding: str = "utf-8", form: NumberForm = PLAIN
) -> tuple[list[str], Iterator[Unread]]:
    """Return the names in the first line, and the rows below it in blocks; raise DataError for an invalid file."""
    pieces = _pieces(path, encoding)
    head = _head(path, pieces)
    line, _, rest = head.partition(b"\n")
    if b'"' in line:
        names, count, rest = _quoted_header(path, head, delimiter)
    else:
        names, count = line.decode().split(delimiter), 1
    names = [name.strip() or f"column_{place}" for place, name in enumerate(names, start=1)]
    if len(names) == 1 and any(other in names[0] for other in ",;\t|" if other != delimiter):
        raise DataError(
            f"{path}:1: one column, {shorten(names[0])!r}, with the delimiter {delimiter!r}; set another delimiter"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}:1: two columns are named {twice[0]!r}; rename one")
    return names, _errors_in_order(_blocks(FileLayout(path, delimiter, form, len(names)), rest, pieces, count + 1))


def read_rest(layout: FileLayout, encoding: str, begin: int, line: int) -> Iterator[Unread]:
    """Return the rows from a byte of the file on, where a line begins, which has this number, from 1."""
    return _errors_in_order(_blocks(layout, b"", _pieces(layout.path, encoding, begin), line))


def _errors_in_order(blocks: Iterator[Unread]) -> Iterator[Unread]:
    """Turn an error into a block that raises it, so that errors of earlier lines come first."""
    try:
        yield from blocks
    except DataError as error:
        found = error

        def fail() -> Block:
            raise found

        yield fail


def _head(path: Path, pieces: Iterator[bytes]) -> bytes:
    """Return chunks up to the end of the first line, and one in which quotes are closed."""
    head = b""
    for piece in pieces:
        head += piece
        if head.strip() and b"\n" in head.lstrip(b"\n"):
            break
    head = head.lstrip(b"\n")
    if not head.strip():
        raise DataError(f"{path}: the file is empty; it must begin with a line of column names")
    if b"\0" in head[:BLOCK_BYTES].partition(b"\n")[0]:
        raise DataError(
            f"{path}:1: zero bytes between the characters; set encoding to utf-16-le, or save it as UTF-8"
        )
    return head


def _quoted_header(path: Path, head: bytes, delimiter: str) -> tuple[list[str], int, bytes]:
    lines = io.StringIO(head.decode(), newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(reader)
    except csv.Error as error:
        raise DataError(f"{path}:1: {error}; fix the quotes") from error
    rest = b"\n".join(head.split(b"\n")[reader.line_num :])
    return names, reader.line_num, rest


def _blocks(layout: FileLayout, rest: bytes, pieces: Iterator[bytes], line: int) -> Iterator[Unread]:
    parser = DecimalParser()
    # The C allocator keeps freed memory for reuse up to the largest freed block (at most 32 MB); without this, every
    # array of every block would be requested from the system and cleared.
    np.empty(31 * 2**20, np.uint8)
    stream = chain([rest], pieces)
    tail, piece = b"", next(stream, None)
    while piece is not None:
        following = next(stream, None)
        if b'"' in piece:
            for block in _quoted(layout, _lines(tail + piece, chain([following or b""], stream)), line):
                yield partial(_self, block)
            return
        if following is None and (tail or piece) and not piece.endswith(b"\n"):
            piece += b"\n"
        if cut := piece.rfind(b"\n") + 1:
            count = int(np.count_nonzero(np.frombuffer(piece, np.uint8) == ord("\n")))  # faster than bytes.count
            yield PlainLines(layout, (tail, memoryview(piece)[:cut]), line, count, parser)
            line += count
            tail = b""
        tail, piece = tail + piece[cut:], following


def _self(block: Block) -> Block:
    return block


@dataclass(frozen=True, slots=True)
class PlainLines:
    """Lines without quotes, in two parts. Called in any thread, returns their rows."""

    layout: FileLayout
    parts: tuple[bytes, memoryview]
    line: int
    """The number of the first line in the file, from 1."""
    count: int
    parser: DecimalParser

    def __call__(self) -> Block:
        """Read the lines: empty ones, and those that are too long or too short, are left to the csv module."""
        size = sum(map(len, self.parts))
        buffer = b"".join((b"x" * PADDING, *self.parts, b"x" * (-size % 8)))
        cells = find_cells(self.layout, buffer)
        if cells is None or (self.layout.columns == 1 and b"\n\n" in buffer):
            lines = _lines(b"", iter([b"".join(self.parts)]))
            return next(_quoted(self.layout, lines, self.line, size), QuotedBlock(self.layout, [], []))
        return PlainBlock(self.layout, buffer, self.line, cells, self.parser)


def _lines(rest: bytes, pieces: Iterator[bytes]) -> Iterator[str]:
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield f"{line.decode()}\n"
    for line in rest.split(b"\n"):
        yield f"{line.decode()}\n"


def _quoted(layout: FileLayout, lines: Iterator[str], first: int, most: int = QUOTED_ROWS) -> Iterator[QuotedBlock]:
    """Read with the csv module, which supports quotes and skips empty lines."""
    reader = csv.reader(lines, delimiter=layout.delimiter, strict=True)
    rows: list[list[str]] = []
    places: list[int] = []
    start = first
    try:
        for row in reader:
            if row:
                if len(row) != layout.columns:
                    raise DataError(
                        f"{layout.path}:{start}: {len(row)} values, but the first line names {layout.columns} columns; "
                        f"fix this line"
                    )
                rows.append(row)
                places.append(start)
            start = first + reader.line_num
            if len(rows) == most:
                yield QuotedBlock(layout, rows, places)
                rows, places = [], []
    except csv.Error as error:
        raise DataError(f"{layout.path}:{start}: {error}; close the quote that begins here") from error
    if rows:
        yield QuotedBlock(layout, rows, places)


def _pieces(path: Path, encoding: str, begin: int = 0) -> Iterator[bytes]:
    """Yield the file as UTF-8 with `\n` line ends, whatever its encoding, without a byte-order mark."""
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise DataError(f"encoding: {encoding!r} is not known; use utf-8, latin-1, cp1252, utf-16 …") from None
    decoder = codecs.getincrementaldecoder("utf-8-sig" if name == "utf-8" and not begin else name)()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            yield from _decoded(path, file, decoder, newlines, is_utf8=name == "utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def _decoded(
    path: Path,
    file: BinaryIO,
    decoder: codecs.IncrementalDecoder,
    newlines: io.IncrementalNewlineDecoder,
    *,
    is_utf8: bool,
) -> Iterator[bytes]:
    begun = False
    while True:
        raw = file.read(BLOCK_BYTES - file.tell() % BLOCK_BYTES)  # the same blocks wherever reading begins
        # Most files are plain ASCII without carriage returns: nothing to convert.
        is_plain = is_utf8 and begun and raw.isascii() and b"\r" not in raw
        waiting = decoder.getstate()[0] or newlines.getstate()[1] & 1  # an incomplete character or line end
        if is_plain and raw and not waiting:
            yield raw
            continue
        begun = True
        try:
            text = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            offset = file.tell() - len(error.object) + error.start
            raise DataError(
                f"{path}: byte {error.object[error.start]:#04x} at offset {offset} is not {error.encoding}; "
                f"set encoding (such as latin-1, cp1252 or utf-16), or save the file as UTF-8"
            ) from error
        text = newlines.decode(text, final=not raw)
        if text:
            yield text.encode()
        if not raw:
            return
