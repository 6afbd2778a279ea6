"""The end of a growing file of JSON lines, opened only when the file has changed."""

from pathlib import Path

from etude.monitor.jsonl import last_line_end
from etude.monitor.reading import Follower

MOST_BEHIND = 8 << 20
"""Bytes that are read at once."""


class Tail(Follower):
    """New lines of a file, from its end or from a place in it."""

    def __init__(self, path: Path, after: int | None = None) -> None:
        super().__init__(path)
        self.is_live = True
        """Whether its run is."""
        self._known_restarts = 0
        self._seen: tuple[int, ...] = ()
        self.lines(0)  # so that the file is known, and its replacement noticed
        self.offset = last_line_end(path) if after is None else after

    def new_lines(self) -> bytes:
        """Return new whole lines."""
        try:
            facts = self.path.stat()
        except OSError:
            return b""
        seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if seen == self._seen:
            return b""
        before = self.offset
        lines = self.lines(MOST_BEHIND)
        if self.offset in (before, facts.st_size):
            self._seen = seen
        return lines

    def to_end(self) -> None:
        """Skip what there is."""
        self.offset = last_line_end(self.path)

    @property
    def is_replaced(self) -> bool:
        """Whether the file was replaced since the last call."""
        was, self._known_restarts = self._known_restarts, self.restarts
        return self.restarts != was
