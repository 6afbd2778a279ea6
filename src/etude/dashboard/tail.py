"""The end of a growing file of JSON lines, read only when the file has changed."""

import os
from pathlib import Path
from typing import Any

from etude.monitor.reading import Follower

MOST_BEHIND = 8 << 20
"""Bytes that are read at once."""


class Tail:
    """New lines of a file, from its end or from a place in it."""

    def __init__(self, path: Path, after: int | None = None) -> None:
        self.path = path
        self._follower = Follower(path)
        self._seen: Any = None
        self._restarts = 0
        self.is_live = True
        """Whether its run is."""
        self._follower.lines(0)  # so that the file is known, and its replacement noticed
        self._follower.offset = last_line_end(path) if after is None else after

    @property
    def offset(self) -> int:
        """Bytes read so far."""
        return self._follower.offset

    def read(self) -> bytes:
        """Return new whole lines."""
        try:
            facts = self.path.stat()
        except OSError:
            return b""
        seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if seen == self._seen:
            return b""
        lines = self._follower.lines(MOST_BEHIND)
        if self.offset >= facts.st_size or not lines:
            self._seen = seen
        return lines

    def to_end(self) -> None:
        """Skip what there is."""
        self._follower.offset = last_line_end(self.path)

    @property
    def file(self) -> tuple[int, int] | None:
        """Device and inode of the file."""
        return self._follower.file

    @property
    def is_replaced(self) -> bool:
        """Whether the file was replaced since the last call."""
        was, self._restarts = self._restarts, self._follower.restarts
        return self._restarts != was


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_line_end(path: Path) -> int:
    """Return where the last whole line of a file ends."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - (1 << 16))
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
                end = start
    except OSError:
        pass
    return 0
