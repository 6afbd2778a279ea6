"""Texts, matrices and pictures of a run by step: an index of media.jsonl, whose records are read when asked for."""

import threading
from pathlib import Path
from typing import Any

from etude.dashboard.parsing import parse_line
from etude.monitor.pictures import read_picture
from etude.monitor.reading import MEDIA, Follower

_MOST_ENTRIES = 100_000


class MediaIndex:
    """Where the records of media.jsonl are."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / MEDIA
        self._lock = threading.Lock()
        self._follower = Follower(self.path)
        self._restarts = 0
        self._places: dict[tuple[str, int], tuple[str, int, int]] = {}

    def list(self) -> list[dict[str, Any]]:
        """Return the names, each with its kind and the steps at which there is something."""
        found: dict[str, dict[str, Any]] = {}
        for (name, step), (media, _, _) in sorted(self._read().items()):
            found.setdefault(name, {"name": name, "media": media, "steps": []})["steps"].append(step)
        return list(found.values())

    def get(self, name: str, step: int | None) -> dict[str, Any] | None:
        """Return the record of a name at a step, the last one if there is no step; None if there is none."""
        places = self._read()
        step = max((at for of, at in places if of == name), default=None) if step is None else step
        if step is None or (name, step) not in places:
            return None
        _, offset, length = places[name, step]
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                record = parse_line(file.read(length))
        except OSError:
            return None
        return record if isinstance(record, dict) else None

    def picture(self, name: str, step: int | None) -> tuple[bytes, str] | None:
        """Return a picture and its type; None unless it is a file inside the run's folder."""
        record = self.get(name, step)
        if record is None or record.get("media") != "image" or not isinstance(record.get("data"), str):
            return None
        return read_picture(self.run, record["data"])

    def _read(self) -> dict[tuple[str, int], tuple[str, int, int]]:
        with self._lock:
            while True:
                offset = self._follower.offset
                lines = self._follower.lines()
                if self._follower.restarts != self._restarts:
                    self._restarts, self._places, offset = self._follower.restarts, {}, 0
                for line in lines.split(b"\n")[:-1]:
                    self._add(line, offset)
                    offset += len(line) + 1
                if not lines:
                    return dict(self._places)

    def _add(self, line: bytes, offset: int) -> None:
        match parse_line(line):
            case {"name": str(name), "media": str(media), "step": int(step)} if len(self._places) < _MOST_ENTRIES:
                self._places[name, step] = (media, offset, len(line))
