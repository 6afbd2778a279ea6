"""Records as lines of JSON. A full disk costs records, never the run."""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

logger = logging.getLogger("etude")

MAX_PENDING = 1000
"""Records kept while the disk is full, to be written when there is space; the oldest are dropped first."""

NONFINITE = "nonfinite"
"""Key that lists the non-finite values of a record; they are written as null."""


class JsonlSink:
    """A file of JSON lines, to which records are appended, each in one unbuffered write.

    Non-finite values are written as null and listed under `nonfinite`, so every line is valid JSON. A failed write
    leaves no partial line. Its lines are kept and retried with the next ones; the problem is reported once, through
    `on_problem`, until a write succeeds again.
    """

    def __init__(self, path: str | Path, on_problem: Callable[[str], None] = logger.warning) -> None:
        self.path = Path(path)
        self._on_problem = on_problem
        self._descriptor: int | None = None
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)
        self._failing = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; `tail -f` shows it at once. Does not raise OSError."""
        self._pending.append(encode(record).encode() + b"\n")
        try:
            self._append(b"".join(self._pending))
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._on_problem(
                    f"cannot write {self.path}: {error.strerror or error}; training continues without it"
                )
        else:
            self._failing = False
            self._pending.clear()

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, data: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            drop_torn_line(self.path, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            self.close()  # reopening also replaces a handle that a network file system has lost
            raise


def encode(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON.

    JSON has no NaN and no infinity: such values become null, and `nonfinite` lists them.

    >>> encode({"step": 3, "loss": float("nan"), "lr": 0.1})
    '{"step": 3, "loss": null, "lr": 0.1, "nonfinite": ["loss"]}'
    """
    return json.dumps(plain(record), allow_nan=False)


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that is valid JSON: numbers of any library as Python numbers, other objects as text."""
    nonfinite: list[str] = []
    result = {str(key): _plain(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        result[NONFINITE] = nonfinite
    return result


def decode(line: str | bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the line does not hold one.

    >>> decode('{"step": 3, "lo') is None
    True
    """
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file in order; invalid (truncated) lines are skipped."""
    try:
        with path.open("rb") as file:
            yield from (record for line in file if (record := decode(line)) is not None)
    except FileNotFoundError:
        return


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        nonfinite.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}.{index}", nonfinite) for index, item in enumerate(value)]
    return str(value)


def last_line_end(path: Path) -> int:
    """Return where the last whole line of a file ends; 0 if there is none."""
    with suppress(OSError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def drop_torn_line(path: Path, descriptor: int) -> None:
    """Truncate a file, open for writing, after its last newline: the rest was being written when a process died."""
    if (end := last_line_end(path)) < os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, end)
