"""Lines of a delimited file read by pyarrow, if installed and if it reads them exactly as we do."""

import codecs
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.data.catalog.decimals import Numbers, Places
from etude.data.catalog.delimited import MISSING, PLAIN, Block, FileLayout

MIN_BYTES = 2**25
"""Minimum file size for which pyarrow is imported."""
SPAN_BYTES = 2**23
"""Bytes that are read in one call of pyarrow, because each call has overhead."""
CHUNK_BYTES = 2**19
"""Bytes that pyarrow reads at a time, to fit the cache. Longer lines are left to our own reader."""
Span = tuple[int, int]
"""Where some whole lines begin and end in a file, in bytes."""
_NULLS = sorted({"".join(one) for word in MISSING for one in product(*((char, char.upper()) for char in word))})


class ArrowReader:
    """Reads plain lines; uncertain ones, and the rest of that file, are left to our own reader."""

    def __init__(self, layout: FileLayout, encoding: str, numbers: Sequence[int], texts: Sequence[int]) -> None:
        """`numbers` and `texts` are the columns to read. Raises ImportError without pyarrow."""
        import pyarrow as pa
        from pyarrow import csv

        self._pa, self._csv, self._layout, self.numbers, self.texts = pa, csv, layout, numbers, texts
        self._encoding = codecs.lookup(encoding).name
        # With one column, an empty line is not a row. In other encodings the byte of \n may be half a character.
        has_lines = self._encoding.startswith(("utf-8", "ascii", "iso8859", "cp125"))
        self.is_sure = layout.form == PLAIN and layout.columns > 1 and has_lines
        category = pa.dictionary(pa.int32(), pa.string())
        types = {str(place): pa.float64() for place in numbers} | {str(place): category for place in texts}
        names = [str(place) for place in range(layout.columns)]
        self._options = {
            "parse_options": csv.ParseOptions(
                delimiter=layout.delimiter, quote_char=False, escape_char=False, ignore_empty_lines=False
            ),
            "convert_options": csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=_NULLS, check_utf8=False
            ),
        }
        self._read_options = csv.ReadOptions(use_threads=False, column_names=names, block_size=CHUNK_BYTES)

    def begin(self, line: int) -> int | None:
        """Return the byte at which a line begins, counted from 1 after empty ones; None if lines end in `\r` alone."""
        number, begin = 0, 0
        with self._layout.path.open("rb") as file:
            for one in file:
                begin += len(one)
                number += bool(number or one.removeprefix(codecs.BOM_UTF8).strip(b"\r\n"))
                if b"\r" in one.removesuffix(b"\r\n"):
                    break
                if number == line - 1:
                    return begin
        return None

    def spans(self, begin: int) -> Iterator[Span]:
        """Yield all lines from a byte on."""
        with self._layout.path.open("rb") as file:
            while file.seek(begin) is not None and file.read(1):
                file.seek(begin + SPAN_BYTES)
                end = file.tell() + len(file.readline())
                yield begin, end
                begin = end

    def read(self, span: Span) -> "ArrowBlock | None":
        """Return lines, counted from 0, as rows; None if they must be read by our own reader."""
        text = self._text(span) if self.is_sure else None
        if text is None:
            return None
        try:
            table = self._csv.read_csv(self._pa.BufferReader(text), self._read_options, **self._options)
        except self._pa.ArrowException:
            self.is_sure = False
            return None
        block = ArrowBlock(self._layout, self, table)
        # pyarrow reads an empty line as a row without values; we skip it.
        has_empty = block.may_have_empty_lines and (text.startswith(b"\n") or b"\n\n" in text)
        if has_empty or not block.is_sure:
            self.is_sure = False
            return None
        return block

    def _text(self, span: Span) -> bytes | None:
        """Return lines in UTF-8 that end in `\n`; None if they have quotes, or something else that is uncertain."""
        with self._layout.path.open("rb", buffering=0) as file:
            file.seek(span[0])
            text = file.read(span[1] - span[0])
        if not text.isascii():
            try:
                text = text.decode(self._encoding).encode()
            except UnicodeDecodeError:
                return None
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        return None if b"\r" in text or b'"' in text or text.startswith(codecs.BOM_UTF8) else text


class ArrowBlock(Block):
    """Rows that pyarrow has read."""

    def __init__(self, layout: FileLayout, reader: ArrowReader, table: Any) -> None:
        super().__init__(layout, range(len(table)), table.nbytes)
        self._values = np.empty((len(reader.numbers), len(table)))
        self._texts = dict(zip(reader.texts, table.columns[len(reader.numbers) :], strict=True))
        numbers, end = table.select(range(len(reader.numbers))), 0
        for batch in numbers.to_batches() if reader.numbers else ():
            begin, end = end, end + len(batch)
            self._values[:, begin:end] = batch.to_tensor(null_to_nan=True, row_major=False).to_numpy().T
        gaps = np.isnan(self._values)
        missing = np.count_nonzero(gaps)
        # -nan and nan(1) are not missing values
        self.is_sure = not missing or missing == sum(cells.null_count for cells in numbers.columns)
        self.may_have_empty_lines = bool(gaps.all(0).any())

    def numbers(self, columns: Sequence[int], count: int | None = None) -> Numbers:  # noqa: ARG002
        """Return the reader's columns as numbers."""
        return self._values.T[:count]

    def categories(self, column: int) -> tuple[Places, list[str]]:
        """Return a column as indices into a list of its texts."""
        cells = self._texts[column].combine_chunks()
        return arrow_values(cells.indices, -1), [text.strip() for text in cells.dictionary.to_pylist()]


def arrow_values(cells: Any, missing: float) -> npt.NDArray[Any]:
    """Return numbers with `missing` in the place of nulls. pyarrow's `to_numpy` and `fill_null` would import pandas."""
    dtype = np.dtype(cells.type.to_pandas_dtype())
    values = np.frombuffer(cells.buffers()[1], dtype, len(cells), cells.offset * dtype.itemsize)
    if not cells.null_count:
        return values
    return np.where(arrow_values(cells.is_null().cast("uint8"), 0).view(bool), dtype.type(missing), values)


def arrow_reader(
    layout: FileLayout, encoding: str, numbers: Sequence[int], texts: Sequence[int]
) -> ArrowReader | None:
    """Return a faster reader for a large file, if installed."""
    try:
        is_large = layout.path.stat().st_size >= MIN_BYTES
        reader = ArrowReader(layout, encoding, numbers, texts) if is_large else None
    except (ImportError, OSError):  # it is not installed, or not for this machine
        return None
    return reader if reader is not None and reader.is_sure else None
