"""Compare runs: in what their configs and environments differ, and their last and best metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.callbacks.progress_lines import is_metric, split_name
from etude.core.errors import ConfigError
from etude.core.monitor import known_mode
from etude.monitor.live import Monitor, RunStatus
from etude.monitor.reading import ENVIRONMENT, read_config, read_json
from etude.monitor.series import RunMetrics, Series
from etude.runs.leaves import differences, leaves

_ALWAYS_DIFFERENT = frozenset({"time"})


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of all runs; None where a run has none."""

    name: str
    last: list[float | None]
    best: list[float | None]
    winner: int | None
    """The run with the best value, if that is known."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between runs, and how good they are."""

    names: list[str]
    statuses: list[RunStatus]
    config: list[tuple[str, list[Any]]]
    """Key and values of the settings that differ."""
    environment: list[tuple[str, list[Any]]]
    metrics: list[MetricRow]
    runs: list[RunMetrics]
    monitor: str
    """The metric by which the runs are judged, if they share it."""

    def curves(self, name: str) -> list[tuple[str, Series]]:
        """Return the curve of a metric by step, with the name of its run; of those runs that have it."""
        pairs = zip(self.names, self.runs, strict=True)
        return [(run, metrics.series(name)) for run, metrics in pairs if name in metrics.names()]


def compare_runs(paths: Sequence[Path], at_least: int = 2) -> Comparison:
    """Compare run folders, also of running and dead runs; raise ConfigError for too few."""
    if len(paths) < at_least:
        raise ConfigError("a comparison needs at least two runs; name another one")
    runs, statuses = [RunMetrics(path) for path in paths], [Monitor(path).read() for path in paths]
    monitors = {status.monitor for status in statuses}
    modes = {status.monitor: status.mode for status in statuses}
    names = dict.fromkeys(name for run in runs for name in run.names("val", "epoch") or run.names())
    shown = [name for name in names if is_metric(name) or _is_of_task(name)]
    rows = [_metric_row(name, runs, modes.get(name) or known_mode(name)) for name in shown]
    environments = [environment_of(path) for path in paths]
    return Comparison(
        short_names(paths),
        statuses,
        differences([leaves(read_config(path)) for path in paths]),
        differences(environments),
        sorted(rows, key=lambda row: not row.name.startswith("val_")),
        runs,
        monitors.pop() if len(monitors) == 1 else "",
    )


def environment_of(path: Path) -> dict[str, Any]:
    """Return versions, device and so on of a run by dotted key."""
    found = leaves(read_json(path / ENVIRONMENT))
    return {key: value for key, value in found.items() if key and key not in _ALWAYS_DIFFERENT}


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the paths without the folders that all share.

    >>> short_names([Path("runs/a/1"), Path("runs/b/1")]), short_names([Path("runs/a")])
    (['a/1', 'b/1'], ['a'])
    """
    parts = [path.parts for path in paths]
    shared = 0
    while all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    return [str(Path(*one[shared:])) for one in parts]


def _is_of_task(name: str) -> bool:
    group, own = split_name(name)
    return bool(group) and own != "weight" and is_metric(own)


def _metric_row(name: str, runs: Sequence[RunMetrics], mode: str | None) -> MetricRow:
    last, best = list[float | None](), list[float | None]()
    for run in runs:
        values = _values(run, name)
        last.append(None if values is None else float(values[-1]))
        finite = values[np.isfinite(values)] if values is not None else np.empty(0)
        known = mode is not None and len(finite) > 0
        best.append(float(finite.min() if mode == "min" else finite.max()) if known else None)
    return MetricRow(name, last, best, _winner(best, mode))


def _values(run: RunMetrics, name: str) -> Any:
    """Return the values of a metric over validations or epochs, or else of log points; None if there are none."""
    for split in ("val", "epoch", "train"):
        if name in run.names(split):
            return run.series(name, split=split).y
    return None


def _winner(best: Sequence[float | None], mode: str | None) -> int | None:
    known: Mapping[int, float] = {
        place: value for place, value in enumerate(best) if value is not None and math.isfinite(value)
    }
    if len(known) < 2 or len(set(known.values())) < 2:
        return None
    return (min if mode == "min" else max)(known, key=known.__getitem__)
