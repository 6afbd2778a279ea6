"""The runs below a folder, by id. Every run is read again only when one of its files has changed."""

import os
import stat
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.dashboard.parsing import PLACE, parse
from etude.dashboard.series import Facts
from etude.monitor.live import Monitor, RunStatus
from etude.monitor.reading import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    MEDIA,
    METRICS,
    RESULT,
    STATUS,
    Follower,
    find_runs,
    flat,
    read_config,
)

_HEAD_BYTES = 1 << 15
_TAIL_BYTES = 1 << 16
_MOST_FILE_BYTES = 16 << 20
"""Size of a config, result or environment above which a run is not read."""
_MOST_NODES = 20_000
_WHOLE = (CONFIG, STATUS, RESULT, ENVIRONMENT)
_FILES = (*_WHOLE, EVENTS, METRICS, MEDIA)
AGAIN_S = 2.0
"""Seconds after which a run that says nothing is looked at again: it may be lost."""
SCAN_S = 1.0
"""Seconds between two searches for new run folders."""

Signature = tuple[Any, ...]


class Run:
    """One run folder and what was last read of it."""

    def __init__(self, key: str, path: Path) -> None:
        self.key, self.path = key, path
        self.facts = Facts()
        self.names: dict[str, list[str]] = {}
        self._monitor: Monitor | None = None
        self._starts = Follower(path / EVENTS)
        self._restarts = 0
        self._signature: Signature | None = None
        self._state: dict[str, Any] = {}
        self._config: tuple[Signature, dict[str, Any]] | None = None
        self._lock = threading.RLock()
        self._read_at = 0.0

    def read(self) -> dict[str, Any]:
        """Return the state of the run as plain data, without what the settings say about it."""
        with self._lock:
            try:
                signature = _signature(self.path)
                is_old = self._state.get("state") == "running" and time.monotonic() - self._read_at > AGAIN_S
                if signature != self._signature or is_old:
                    self._state = self._read(signature)
                    self._signature, self._read_at = signature, time.monotonic()
            except Exception as error:  # whatever a folder holds, the others are shown
                words = f"cannot be read: {str(error) or type(error).__name__}"
                self._state = _empty(self, "unreadable", words)
                self._signature = None
            return self._state

    @property
    def is_read(self) -> bool:
        """Whether it has been read once."""
        return bool(self._state)

    def last(self) -> dict[str, Any]:
        """Return what was last read, and nothing but its name if it was not read yet."""
        return self._state or _empty(self, "reading", "is being read")

    def changed(self) -> float:
        """Return when the run last recorded something, 0 if nobody knows."""
        try:
            return os.lstat(self.path / METRICS).st_mtime
        except OSError:
            return 0.0

    def problem(self) -> str:
        """Return why files of the run must not be opened, such as a pipe; empty if they may be."""
        try:
            _signature(self.path)
        except OSError as error:
            return f"{self.key} cannot be read: {error}"
        return ""

    def config(self) -> dict[str, Any]:
        """Return the nested config."""
        with self._lock:
            return self._read_config(_signature(self.path))

    def read_facts(self) -> Facts:
        """Return what charts need to know of the run's starts."""
        with self._lock:
            facts = Facts(self.facts.resumes, self.facts.steps_per_epoch, self.facts.parameters)
            while lines := self._starts.lines():
                if self._starts.restarts != self._restarts:
                    self._restarts, facts = self._starts.restarts, Facts()
                for record in parse(lines):
                    if record.get("kind") in ("start", "resume"):
                        _add_start(facts, record)
            self.facts = facts
            return facts

    def _read(self, signature: Signature) -> dict[str, Any]:
        self._monitor = self._monitor or Monitor(self.path)
        records = parse(ends_of(self.path / METRICS))
        status = self._monitor.read(records)
        facts = self.read_facts()
        self._add_names(records)
        return _described(self, status, facts, self._read_config(signature))

    def _read_config(self, signature: Signature) -> dict[str, Any]:
        if self._config is None or self._config[0] != signature[0]:
            self._config = (signature[0], bounded(read_config(self.path)))
        return self._config[1]

    def _add_names(self, records: list[dict[str, Any]]) -> None:
        """Add the names of metrics in some records."""
        found = {split: dict.fromkeys(names) for split, names in self.names.items()}
        forms = {(str(record.get("split")), *record): record for record in records}
        for (split, *names), record in forms.items():
            values = {name: record[name] for name in names if name not in PLACE}
            known = [name for name, one in values.items() if one is None or isinstance(one, (int, float))]
            found.setdefault(split, {}).update(dict.fromkeys(known))
        self.names = {split: list(names) for split, names in found.items()}


class Catalogue:
    """The runs below a folder. `runs` searches for new ones at most once a second."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, Run] = {}
        self._keys: dict[Path, str] = {}
        self._scanned = -SCAN_S
        self._lock = threading.Lock()

    def get(self, key: str) -> Run | None:
        """Return a run by id; None if there is none. Text from a request is only looked up, never made a path."""
        run = self._runs.get(key)
        if run is None:
            self.runs()
            run = self._runs.get(key)
        return run

    def runs(self) -> list[Run]:
        """Return all runs, in order of their paths."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_S:
                found = {self._key(path): path for path in find_runs(self.root)}
                self._runs = {key: self._runs.get(key) or Run(key, path) for key, path in found.items()}
                self._scanned = time.monotonic()
            return list(self._runs.values())

    def _key(self, path: Path) -> str:
        """Return the id of a run: its path below the root, as text that is valid UTF-8 and unique."""
        if path not in self._keys:
            key = os.fsencode(path.relative_to(self.root).as_posix()).decode(errors="backslashreplace")
            taken = set(self._keys.values())
            while key in taken:
                key += "~"
            self._keys[path] = key
        return self._keys[path]


def bounded(value: Any, most: int = _MOST_NODES) -> Any:
    """Return a YAML value as plain JSON data; aliases that expand without end are cut."""
    left = iter(range(most))

    def copied(value: Any, depth: int) -> Any:
        if next(left, None) is None or depth > 32:
            return "…"
        if isinstance(value, dict):
            return {str(key): copied(one, depth + 1) for key, one in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [copied(one, depth + 1) for one in value]
        return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)

    return copied(value, 0)


def _add_start(facts: Facts, record: dict[str, Any]) -> None:
    time, parameters, per_epoch = (record.get(name) for name in ("time", "parameters", "steps_per_epoch"))
    if record["kind"] == "resume" and isinstance(time, (int, float)):
        facts.resumes = sorted([*facts.resumes, float(time)])
    if isinstance(parameters, int) and parameters > 0:
        facts.parameters = parameters
    if isinstance(per_epoch, int) and per_epoch > 0:
        facts.steps_per_epoch = per_epoch


def _signature(run: Path) -> Signature:
    """Return what changes with every file of a run; raise OSError for one that must not be read."""
    found: list[Signature | None] = []
    for name in _FILES:
        try:
            facts = os.lstat(run / name)
        except FileNotFoundError:
            found.append(None)
            continue
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{name} is not a regular file")
        if name in _WHOLE and facts.st_size > _MOST_FILE_BYTES:
            raise OSError(f"{name} is too long")
        found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def ends_of(path: Path) -> bytes:
    """Return whole lines of the start and the end of a file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(_HEAD_BYTES)
            start = max(len(first), size - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(_TAIL_BYTES)
    except OSError:
        return b""
    if start > len(first):  # the first line of the tail is cut
        first, tail = first[: first.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :]
    data = first + tail
    return data[: data.rfind(b"\n") + 1]


def _described(run: Run, status: RunStatus, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run as plain data."""
    return {
        "id": run.key,
        **{name: value for name, value in asdict(status).items() if name != "path"},
        "progress": status.progress,
        "steps_per_epoch": facts.steps_per_epoch,
        "parameters": facts.parameters,
        "config": flat(config),
        "names": run.names,
    }


def _empty(run: Run, state: str, message: str) -> dict[str, Any]:
    """Return a state that says only that."""
    name = os.fsencode(run.path.name).decode(errors="backslashreplace")
    return _described(run, RunStatus(run.path, name, state, message=message), Facts(), {})
