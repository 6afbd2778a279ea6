"""Lines of a delimited file read by pyarrow, where it is installed and reads them exactly as we do."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from etude.data.catalog.decimals import PADDING, Numbers, Places
from etude.data.catalog.delimited import MISSING, PLAIN, Block, Layout, PlainLines

MIN_BYTES = 2**25
"""Of a file: smaller ones are read before pyarrow is imported."""
_NULLS = sorted({"".join(one) for word in MISSING for one in product(*((char, char.upper()) for char in word))})


class ArrowReader:
    """Reads blocks of plain lines; what it is not sure of is left to our own reader, as is the rest of that file."""

    def __init__(self, layout: Layout, numbers: Sequence[int], texts: Sequence[int]) -> None:
        """`numbers` and `texts` are the columns to read. Raises ImportError without pyarrow."""
        import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from pyarrow import csv  # type: ignore[import-untyped, import-not-found, unused-ignore]

        self._pa, self._csv, self.numbers, self.texts = pa, csv, numbers, texts
        self.is_sure = layout.form == PLAIN and layout.columns > 1  # of one column, an empty line is no row
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
        self._read_options = {"use_threads": False, "column_names": names}

    def read(self, lines: PlainLines) -> Block | None:
        """Return the lines; None if they have to be read otherwise."""
        size = lines.end - PADDING
        text = memoryview(lines.buffer)[PADDING : lines.end]
        if not self.is_sure or bytes(text[:3]) == b"\xef\xbb\xbf":
            return None
        options = self._csv.ReadOptions(block_size=size + 1, **self._read_options)
        try:
            table = self._csv.read_csv(self._pa.BufferReader(text), options, **self._options)
        except self._pa.ArrowException:
            self.is_sure = False
            return None
        if len(table) < lines.count:  # empty lines, which it passes over
            return None
        block = ArrowBlock(lines, self, table.combine_chunks())
        self.is_sure = self.is_sure and block.is_sure
        return block if block.is_sure else None


class ArrowBlock(Block):
    """Rows that pyarrow has read."""

    def __init__(self, lines: PlainLines, reader: ArrowReader, table: Any) -> None:
        super().__init__(lines.layout, lines.line + np.arange(len(table)), lines.end)
        self._values = np.empty((len(table), len(reader.numbers)))
        self.is_sure = True
        for place, column in enumerate(reader.numbers):
            cells = table.column(str(column)).chunk(0)
            values = cells.to_numpy(zero_copy_only=False)
            # -nan and nan(1) are no missing values.
            self.is_sure = self.is_sure and np.count_nonzero(np.isnan(values)) == cells.null_count
            self._values[:, place] = values
        self._texts = {column: table.column(str(column)).chunk(0) for column in reader.texts}

    def numbers(self, columns: Sequence[int]) -> Numbers:  # noqa: ARG002
        """Return the reader's columns as numbers."""
        return self._values

    def categories(self, column: int) -> tuple[Places, list[str]]:
        """Return a column as places in a list of its texts."""
        cells = self._texts[column]
        return cells.indices.to_numpy(), [text.strip() for text in cells.dictionary.to_pylist()]
