"""Read run folders, also while they are written: find them, follow their files, read their last record."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from etude.core.run_layout import CHECKPOINTS
from etude.monitor.jsonl import decode

CONFIG, METRICS, EVENTS, MEDIA = "config.yaml", "metrics.jsonl", "events.jsonl", "media.jsonl"
STATUS, RESULT, ENVIRONMENT = "status.json", "result.json", "env.json"
TRIALS = "trials.json"
"""File of a sweep, beside the run folders of its trials."""
_MARKS = frozenset([METRICS, EVENTS, STATUS, RESULT])
_BLOCK = 1 << 16
MOST_BYTES = 1 << 24
"""Bytes that `Follower.read` takes at once, so that a long file is read in parts; a longer line is skipped."""


def find_runs(root: str | Path) -> Iterator[Path]:
    """Yield the run folders at or below `root`, in order of their names; links are not followed."""
    for folder, inside, files in os.walk(root):
        if CONFIG in files and not _MARKS.isdisjoint(files):
            inside.clear()
            yield Path(folder)
        else:
            inside[:] = sorted(one for one in inside if one != CHECKPOINTS and not one.startswith("."))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty if there is none, or it cannot be read."""
    try:
        return decode(path.read_bytes()) or {}
    except OSError:
        return {}


def last_lines(path: Path, most_bytes: int = _BLOCK) -> bytes:
    """Return the whole lines in the last bytes of a file; empty if there are none."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(start)
            data = file.read(most_bytes)
    except OSError:
        return b""
    return data[data.find(b"\n") + 1 if start else 0 : data.rfind(b"\n") + 1]


def last_records(path: Path, most_bytes: int = _BLOCK) -> list[dict[str, Any]]:
    """Return the records at the end of a file of JSON lines, oldest first."""
    return [record for line in last_lines(path, most_bytes).splitlines() if (record := decode(line)) is not None]


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Follower:
    """Reads a file of JSON lines that grows: each `read` returns the whole lines that are new.

    A resumed run replaces the file by a shorter one: `restarts` counts that, and reading begins again.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "metrics.jsonl"
    ...     _ = path.write_bytes(b'{"step": 1}\\n{"st')
    ...     follower = Follower(path)
    ...     first = follower.read()
    ...     _ = path.write_bytes(b'{"step": 1}\\n{"step": 2}\\n')
    ...     first, follower.read()
    ([{'step': 1}], [{'step': 2}])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read so far, up to the end of a line."""
        self.restarts = 0
        self.file: tuple[int, int] | None = None
        """Device and inode of what was read."""
        self._in_long_line = False

    def lines(self, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the next whole lines, at most about `most_bytes`; empty if there are none."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if self.file is not None and (
                    (facts.st_dev, facts.st_ino) != self.file or facts.st_size < self.offset
                ):
                    self.offset, self.restarts, self._in_long_line = 0, self.restarts + 1, False
                self.file = (facts.st_dev, facts.st_ino)
                file.seek(self.offset)
                if self._in_long_line and not self._skip_line(file):
                    return b""
                data = file.read(most_bytes)
                if b"\n" not in data and len(data) == most_bytes:  # a line longer than that
                    data += file.readline(MOST_BYTES)
                    if len(data) >= MOST_BYTES and not data.endswith(b"\n"):
                        self._in_long_line = True
                        self.offset += len(data)
                        return b""
        except OSError:
            return b""
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data

    def _skip_line(self, file: BinaryIO) -> bool:
        """Go to the end of a line that is too long; return whether it was found."""
        while rest := file.readline(MOST_BYTES):
            self.offset += len(rest)
            if rest.endswith(b"\n"):
                self._in_long_line = False
                return True
        return False

    def read(self, most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
        """Return the records of the next lines; a line that holds none is skipped."""
        lines = self.lines(most_bytes).splitlines()
        return [record for line in lines if (record := decode(line)) is not None]


def read_config(run: Path) -> dict[str, Any]:
    """Return the config of a run as plain data; empty if it cannot be read."""
    import yaml

    try:
        with (run / CONFIG).open("rb") as file:
            found = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(file).get_single_data()  # several times as fast
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Return a nested config by dotted key; a list is one value.

    >>> flat({"training": {"epochs": 3}, "callbacks": [{"name": "x"}]})
    {'training.epochs': 3, 'callbacks': '[{"name": "x"}]'}
    """
    if isinstance(config, dict):
        return {
            key: one for name, part in config.items() for key, one in flat(part, f"{path}.{name}".strip(".")).items()
        }
    return {path: json.dumps(config, default=str, sort_keys=True) if isinstance(config, list) else config}
