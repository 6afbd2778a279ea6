"""The list of runs: their state, progress and metrics, and the settings in which they differ."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.core.errors import ConfigError, RunFolderError
from etude.core.spelling import shorten, suggest
from etude.monitor.live import Monitor, RunStatus
from etude.monitor.reading import find_runs, read_config
from etude.runs.filters import check_key, keys_for, matches, parse_filter
from etude.runs.leaves import differences, leaves

COLUMNS = ("run", "state", "progress", "best", "last", "duration", "age")
"""What runs can be sorted by, besides metrics and config keys."""
_NOT_SETTINGS = frozenset({"name", "training.checkpoint_dir"})


@dataclass(slots=True)
class ListedRun:
    """One run of a list."""

    id: str
    """Its path below the folder that was listed."""
    status: RunStatus
    config: dict[str, Any]
    """Settings by dotted key."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What filters see, by key."""

    @property
    def age_s(self) -> float | None:
        """Seconds since it showed a sign of life, or was started."""
        seen = self.status.heartbeat or self.status.started
        return None if seen is None else max(0.0, time.time() - seen)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON data."""
        status = asdict(self.status)
        status.pop("path")
        return {"id": self.id, "path": str(self.status.path), **status, "progress": self.status.progress}


def list_runs(
    root: str | Path = "runs", filters: Sequence[str] = (), sort: str = "age", reverse: bool = False
) -> list[ListedRun]:
    """Return the runs below a folder that fit all filters, the newest first unless `sort` names something else.

    Raises RunFolderError if there is no such folder, ConfigError for a filter or a key that fits nothing known.
    """
    root = Path(root)
    if not root.is_dir():
        raise RunFolderError(f"there is no folder {root}; pass the folder of the runs: etude runs list DIR")
    conditions = [parse_filter(text) for text in filters]
    runs = [_read(path, root) for path in find_runs(root)]
    known = dict.fromkeys(key for run in runs for key in run.facts)
    for one in conditions:
        if one.operator and runs:
            check_key(one.key, known, f"--filter {shorten(one.key)}{one.operator}{shorten(one.value)}")
    found = [run for run in runs if all(matches(one, run.id, run.facts) for one in conditions)]
    return _sorted(found, sort, reverse, known)


def differing(runs: Iterable[ListedRun]) -> list[str]:
    """Return the config keys in which the runs differ; a run without a key differs from one that has it."""
    found = differences([run.config for run in runs if run.config])
    return [key for key, _ in found if key not in _NOT_SETTINGS]


def _read(path: Path, root: Path) -> ListedRun:
    name = path.relative_to(root).as_posix()
    status = Monitor(path).read()
    config = leaves(read_config(path))
    run = ListedRun(name, status, config)
    best, last = (one.get("value") if one else None for one in (status.best, status.last))
    own = {
        "run": name,
        "name": status.name,
        "state": status.state,
        "step": status.step,
        "epoch": status.epoch,
        "phase": status.phase,
        "progress": status.progress,
        "duration": status.duration_s,
        "age": run.age_s,
        "best": best,
        "last": last,
    }
    # `lr` is the setting of a config, not the last rate that a schedule gave
    metrics = {key: value for key, value in status.metrics.items() if not keys_for(key, config)}
    run.facts = {**config, **metrics, **own}
    return run


def _sorted(runs: list[ListedRun], sort: str, reverse: bool, known: Iterable[str]) -> list[ListedRun]:
    if sort in ("best", "last"):
        runs = sorted(runs, key=lambda run: _judged(run, sort), reverse=reverse)
        return sorted(runs, key=lambda run: run.facts[sort] is None)
    known = list(known)
    if runs and not keys_for(sort, known):
        raise ConfigError(f"--sort: no run has '{shorten(sort)}'{suggest(sort, dict.fromkeys([*COLUMNS, *known]))}")
    key = (keys_for(sort, known) or [sort])[0]
    runs = sorted(runs, key=lambda run: _order(run.facts.get(key)), reverse=reverse)
    return sorted(runs, key=lambda run: run.facts.get(key) is None)


def _judged(run: ListedRun, which: str) -> tuple[str, float]:
    """Order by the monitored metric, then the better values first."""
    value = run.facts[which]
    sign = -1.0 if run.status.mode == "max" else 1.0
    return run.status.monitor, sign * value if isinstance(value, (int, float)) else 0.0


def _order(value: Any) -> tuple[int, float, str]:
    """Order numbers before texts."""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, str(value)
