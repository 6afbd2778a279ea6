"""Lines of a delimited file read by pyarrow, if installed and if it reads them exactly as we do."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.data.catalog.decimals import Numbers, Places
from etude.data.catalog.delimited import MISSING, PLAIN, Block, FileLayout, PlainLines, Unread

MIN_BYTES = 2**25
"""Minimum file size for which pyarrow is imported."""
ARROW_BLOCKS = 4
"""Blocks that pyarrow reads in one call, because each call has overhead."""
CHUNK_BYTES = 2**20
"""Bytes that pyarrow reads at a time, to fit the cache. Longer lines are left to our own reader."""
_NULLS = sorted({"".join(one) for word in MISSING for one in product(*((char, char.upper()) for char in word))})


class ArrowReader:
    """Reads blocks of plain lines; uncertain blocks, and the rest of that file, are left to our own reader."""

    def __init__(self, layout: FileLayout, numbers: Sequence[int], texts: Sequence[int]) -> None:
        """`numbers` and `texts` are the columns to read. Raises ImportError without pyarrow."""
        import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from pyarrow import csv  # type: ignore[import-untyped, import-not-found, unused-ignore]

        self._pa, self._csv, self.numbers, self.texts = pa, csv, numbers, texts
        self.is_sure = layout.form == PLAIN and layout.columns > 1  # with one column, an empty line is not a row
        category = pa.dictionary(pa.int32(), pa.string())
        types = {str(place): pa.float64() for place in numbers} | {str(place): category for place in texts}
        names = [str(place) for place in range(layout.columns)]
        self._options = {
            "parse_options": csv.ParseOptions(
                delimiter=layout.delimiter, quote_char=False, escape_char=False, ignore_empty_lines=True
            ),
            "convert_options": csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=_NULLS, check_utf8=False
            ),
        }
        self._read_options = csv.ReadOptions(use_threads=False, column_names=names, block_size=CHUNK_BYTES)

    def read(self, group: Sequence[Unread]) -> Block | None:
        """Return consecutive lines; None if they must be read by our own reader."""
        plain = [lines for lines in group if isinstance(lines, PlainLines) and self.is_sure]
        text = b"".join(part for lines in plain for part in lines.parts)
        if len(plain) < len(group) or text.startswith(b"\xef\xbb\xbf"):
            return None
        try:
            table = self._csv.read_csv(self._pa.BufferReader(text), self._read_options, **self._options)
        except self._pa.ArrowException:
            self.is_sure = False
            return None
        if len(table) < sum(lines.count for lines in plain):  # empty lines, which pyarrow skips
            return None
        block = ArrowBlock(plain[0].layout, plain[0].line, self, table)
        self.is_sure = self.is_sure and block.is_sure
        return block if block.is_sure else None


class ArrowBlock(Block):
    """Rows that pyarrow has read."""

    def __init__(self, layout: FileLayout, line: int, reader: ArrowReader, table: Any) -> None:
        super().__init__(layout, line + np.arange(len(table)), table.nbytes)
        self._values = np.empty((len(reader.numbers), len(table)))
        self._texts = dict(zip(reader.texts, table.columns[len(reader.numbers) :], strict=True))
        self.is_sure = True
        for values, cells in zip(self._values, table.columns, strict=False):
            np.concatenate([arrow_values(chunk, np.nan) for chunk in cells.chunks], out=values)
            # -nan and nan(1) are not missing values
            self.is_sure = self.is_sure and np.count_nonzero(np.isnan(values)) == cells.null_count

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


def arrow_reader(layout: FileLayout, numbers: Sequence[int], texts: Sequence[int]) -> ArrowReader | None:
    """Return a faster reader for a large file, if installed."""
    try:
        return ArrowReader(layout, numbers, texts) if layout.path.stat().st_size >= MIN_BYTES else None
    except (ImportError, OSError):  # it is not installed, or not for this machine
        return None
