"""Places in a file: what `ast` and `tokenize` tell as lines and columns, as bytes of the text."""

import re
from typing import Any

import numpy as np

IDENTIFIER = re.compile(rb"[A-Za-z0-9_\x80-\xff]+")


class Place:
    """A text as bytes, and where its lines begin."""

    def __init__(self, text: str) -> None:
        self.text, self.data = text, text.encode()
        self.lines = text.split("\n")
        self.ascii = text.isascii()
        self._columns: dict[int, list[int]] = {}
        sizes = [len(line) if self.ascii else len(line.encode()) for line in self.lines]
        self.starts: list[int] = np.concatenate([[0], np.cumsum(np.array(sizes) + 1)]).tolist()

    def of_characters(self, line: int, column: int) -> int:
        """The byte at a place that `tokenize` tells: columns count characters."""
        if self.ascii or line > len(self.lines):
            return self.starts[min(line, len(self.starts)) - 1] + column
        if line not in self._columns:
            sizes = [len(letter.encode()) for letter in self.lines[line - 1]]
            self._columns[line] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        columns = self._columns[line]
        return self.starts[line - 1] + columns[min(column, len(columns) - 1)]

    def of_bytes(self, line: int | None, column: int | None) -> int:
        """The byte at a place that `ast` tells: columns count bytes."""
        assert line is not None
        assert column is not None
        return self.starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node of the syntax tree begins and ends."""
        return self.of_bytes(node.lineno, node.col_offset), self.of_bytes(node.end_lineno, node.end_col_offset)

    def identifier(self, start: int) -> tuple[int, int]:
        """The name that begins at a byte."""
        match = IDENTIFIER.match(self.data, start)
        return match.span() if match else (start, start)
