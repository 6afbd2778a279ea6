"""Follow a run from another process: its log points and events as the plain lines of the display."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.callbacks.progress_lines import (
    EpochRow,
    View,
    duration,
    epoch_line,
    finite,
    log_line,
    parameters_line,
    validation_line,
)
from etude.core.spelling import printable
from etude.monitor.jsonl import decode
from etude.monitor.live import Monitor, RunStatus
from etude.monitor.reading import EVENTS, METRICS, Follower, size_of

POLL_S = 0.5
"""Seconds between two looks at the files."""
_END_BYTES, _LINE_BYTES = 1 << 20, 1 << 12
"""The end of a long file that is read for the last lines."""
_PART_BYTES = 4 << 20
_EPOCH = b'"split": "epoch"'


class RunTail:
    """The lines of a run: `new_lines` returns those that came since the last call."""

    def __init__(self, run: Path) -> None:
        self._monitor = Monitor(run)
        self._metrics, self._events = Follower(run / METRICS), Follower(run / EVENTS)
        self._view = View()
        self._seen = -1.0
        """Time of the newest record so far; a resumed run writes its file again, with the earlier records."""

    def skip(self, most_bytes: int) -> int:
        """Skip the records before the last bytes of a long file; return how many.

        Epochs are read all the same: later ones are compared with them.
        """
        end, count = size_of(self._metrics.path) - most_bytes, 0
        while self._metrics.offset < end and (lines := self._metrics.lines(min(_PART_BYTES, most_bytes))):
            count += lines.count(b"\n")
            for line in _lines_with(lines, _EPOCH):
                if (record := decode(line)) is not None:
                    self._line(record)
        return count

    def new_lines(self) -> Iterator[str]:
        """Yield the new lines, in the order of their times."""
        seen, events = self._seen, list[dict[str, Any]]()
        while new := self._events.read():
            events += new
        events.sort(key=_time)
        while records := self._metrics.read(_PART_BYTES):
            records.sort(key=_time)
            before = bisect_right(events, _time(records[-1]), key=_time)
            yield from self._lines(sorted([*records, *events[:before]], key=_time), seen)
            del events[:before]
        yield from self._lines(events, seen)

    def _lines(self, records: list[dict[str, Any]], seen: float) -> Iterator[str]:
        for record in records:
            line = self._line(record)  # of an earlier record too: it may name the number of steps
            if _time(record) > seen and line:
                yield printable(line, 1000)
            self._seen = max(self._seen, _time(record))

    def status(self) -> RunStatus:
        """Return the state of the run."""
        return self._monitor.read()

    def _line(self, record: dict[str, Any]) -> str:
        view = self._view
        if (split := record.get("split")) is None:
            return self._event(record)
        numbers = {name: _value(record, name) for name in record if _is_metric(record, name)}
        view.epoch, view.step = _count(record.get("epoch")), _count(record.get("step"))
        if split == "train":
            view.record = finite(numbers)
            return log_line(view)
        if split == "val":
            inside = view.steps_per_epoch is None or view.step % view.steps_per_epoch > 0
            return validation_line(view, finite(numbers)) if inside else ""
        own = {name: value for name, value in finite(numbers).items() if "/" not in name}
        row = EpochRow(view.epoch, numbers.get("epoch_s", 0.0), own, view.phase)
        view.rows = [*(one for one in view.rows if one.epoch < row.epoch), row]
        return epoch_line(view, row)

    def _event(self, record: dict[str, Any]) -> str:
        view, kind, message = self._view, record.get("kind"), str(record.get("message") or "")
        if kind in ("start", "resume"):
            view.title = str(record.get("name") or "")
            view.total_steps, view.total_epochs = _total(record, "total_steps"), _total(record, "total_epochs")
            view.steps_per_epoch = _total(record, "steps_per_epoch")
            size = _count(record.get("parameters"))
            weights = parameters_line(size, _count(record.get("trainable", size)))
            return f"{message}  {record.get('device') or ''}, {weights}"
        if kind == "phase" and record.get("phase"):
            view.phase = "/".join(str(record[key]) for key in ("number", "phases") if record.get(key))
            view.phase = f"{view.phase} {record['phase']}".strip()
        if kind == "end":  # the last line says it, and a resume comes after an earlier end
            return ""
        return message if kind in ("warning", "recovery", "checkpoint") or not kind else f"{kind}: {message}"


def follow(run: Path, lines: int = 20, poll_s: float = POLL_S) -> Iterator[str]:
    """Yield the last lines of a run, then new ones until it ends; the last line says how.

    A run that has died without a word ends too, once its heartbeat is missing.
    """
    tail = RunTail(run)
    if lines == 0:
        yield from tail.new_lines()
    else:
        count, last = tail.skip(_END_BYTES + lines * _LINE_BYTES), deque[str](maxlen=lines)
        for line in tail.new_lines():
            last.append(line)
            count += 1
        if count > lines:
            yield f"… {count - lines:,} earlier lines"
        yield from last
    while (status := tail.status()).state == "running":
        time.sleep(poll_s)
        yield from tail.new_lines()
    yield from tail.new_lines()
    yield end_line(status)


def _lines_with(lines: bytes, words: bytes) -> Iterator[bytes]:
    """Yield the lines that contain some words."""
    place = lines.find(words)
    while place >= 0:
        end = lines.find(b"\n", place)
        yield lines[lines.rfind(b"\n", 0, place) + 1 : end]
        place = lines.find(words, end)


def end_line(status: RunStatus) -> str:
    """Return how a run ended."""
    after = f"{status.state} after {duration(status.duration_s)} at step {status.step:,}"
    if status.state == "lost":
        silent = "" if status.heartbeat is None else f" for {duration(time.time() - status.heartbeat)}"
        return f"{after}: no heartbeat{silent}; `etude resume {status.path}` continues it"
    return after + (f": {printable(status.message)}" if status.message not in ("", status.state) else "")


def _is_metric(record: dict[str, Any], name: str) -> bool:
    return name not in ("step", "epoch", "split", "time") and isinstance(record[name], (int, float, type(None)))


def _value(record: dict[str, Any], name: str) -> float:
    value = record[name]
    return float("nan") if value is None else value


def _time(record: dict[str, Any]) -> float:
    now = record.get("time")
    return float(now) if isinstance(now, (int, float)) else 0.0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _total(record: dict[str, Any], key: str) -> int | None:
    return _count(record.get(key)) or None
