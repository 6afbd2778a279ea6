"""The sweeps to which runs belong: their trials, as the sweep has written them into its folder."""

import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etude.dashboard.catalogue import Run, bounded
from etude.monitor.reading import TRIALS, read_json

_MOST_BYTES = 16 << 20
_MOST_TRIALS = 10_000
_STATES = ("complete", "pruned", "failed", "running", "waiting")


class Sweep:
    """One sweep folder and what was last read of it. Its file may be written by somebody else: it is only data."""

    def __init__(self, key: str, path: Path, content: Mapping[str, Any]) -> None:
        self.key, self.path = key, path
        facts = {name: content.get(name) for name in ("name", "metric", "mode", "total", "time")}
        self._facts = {name: one for name, one in facts.items() if isinstance(one, (str, int, float))}
        self.mode = "max" if content.get("mode") == "max" else "min"
        space, importance = content.get("space"), content.get("importance")
        self._space = bounded(space) if isinstance(space, dict) else {}
        shares = importance if isinstance(importance, dict) else {}
        self._importance = {str(name): one for name, one in shares.items() if _number(one) is not None}
        trials = content.get("trials")
        given = trials[:_MOST_TRIALS] if isinstance(trials, list) else []
        self._trials = [_trial(one) for one in given if isinstance(one, dict) and isinstance(one.get("number"), int)]

    def summary(self) -> dict[str, Any]:
        """Return it without its trials."""
        complete = [one for one in self._trials if one["state"] == "complete" and one["value"] is not None]
        sign = -1.0 if self.mode == "max" else 1.0
        best = min(complete, key=lambda one: sign * one["value"], default=None)
        return {
            "id": self.key,
            "name": self.path.name,
            "experiment": self._facts.get("name"),
            "metric": self._facts.get("metric"),
            "mode": self.mode,
            "total": self._facts.get("total"),
            "time": self._facts.get("time"),
            "states": Counter(one["state"] for one in self._trials),
            "best": None if best is None else {"number": best["number"], "value": best["value"]},
        }

    def whole(self, keys: Mapping[Path, str]) -> dict[str, Any]:
        """Return it with its trials; `keys` are the ids of runs by path."""
        trials = [
            {**one, "runs": [keys[path] for name in one["runs"] if (path := self.path / name) in keys]}
            for one in self._trials
        ]
        return {**self.summary(), "space": self._space, "importance": self._importance, "trials": trials}


class Sweeps:
    """Finds the sweeps of runs; a file is read again only when it has changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, tuple[tuple[int, ...], Sweep]] = {}
        self._lock = threading.Lock()

    def of(self, runs: Iterable[Run]) -> dict[str, Sweep]:
        """Return the sweeps of some runs by id, which is the path below the root."""
        folders = dict.fromkeys(folder for run in runs for folder in _above(run.path) if self._is_inside(folder))
        with self._lock:
            found = [one for folder in folders if (one := self._read(folder)) is not None]
            self._known = {path: one for path, one in self._known.items() if path in folders}
        return {one.key: one for one in found}

    def _is_inside(self, folder: Path) -> bool:
        return folder == self._root or self._root in folder.parents

    def _read(self, folder: Path) -> Sweep | None:
        try:
            facts = os.lstat(folder / TRIALS)
        except OSError:
            return None
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MOST_BYTES:
            return None
        identity = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if folder not in self._known or self._known[folder][0] != identity:
            try:
                content = read_json(folder / TRIALS)
            except RecursionError:
                content = {}
            key = os.fsencode(folder.relative_to(self._root).as_posix()).decode(errors="backslashreplace")
            self._known[folder] = (identity, Sweep(key, folder, content))
        return self._known[folder][1]


def _above(run: Path) -> list[Path]:
    """Return the folders that may be the sweep of a run: a trial is a run, or has one for each seed."""
    return [run.parent, run.parent.parent] if run.name.startswith("seed-") else [run.parent]


def _trial(given: Mapping[str, Any]) -> dict[str, Any]:
    runs, params, state = given.get("runs"), given.get("params"), given.get("state")
    return {
        "number": given["number"],
        "state": state if state in _STATES else "waiting",
        "value": _number(given.get("value")),
        "params": bounded(params, 1000) if isinstance(params, dict) else {},
        "runs": [one for one in runs if isinstance(one, str)] if isinstance(runs, list) else [],
        "start": _number(given.get("start")),
        "end": _number(given.get("end")),
        "error": str(given.get("error") or "")[:1000],
    }


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:
        return None
