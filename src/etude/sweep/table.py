"""A sweep in words: a line for a trial, the table of `etude sweep status`, and how much is left."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState
from rich.table import Table
from rich.text import Text

from etude.core.spelling import printable
from etude.monitor.live import Monitor
from etude.monitor.reading import CONFIG
from etude.sweep.folder import SweepFolder
from etude.sweep.spec import SweepSpec

if TYPE_CHECKING:
    from optuna import Study


@dataclass(slots=True)
class Row:
    """A trial as it is now."""

    number: int
    state: str
    """complete, pruned, failed, running, or stopped: no process runs it."""
    value: float | None
    progress: float | None
    duration_s: float | None
    params: dict[str, Any]
    message: str = ""


def best_trial(study: "Study") -> FrozenTrial | None:
    """Return the best complete trial, None if there is none."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return study.best_trial if complete else None


def line_of(trial: FrozenTrial, study: "Study", spec: SweepSpec) -> str:
    """Return a line about a trial that has ended."""
    params = " ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
    taken = "" if trial.duration is None else f"  {trial.duration.total_seconds():.1f} s"
    if trial.state == TrialState.FAIL:
        return f"trial {trial.number}  failed: {trial.user_attrs.get('error', '')}  {params}"
    if trial.state == TrialState.PRUNED:
        count = len(trial.intermediate_values)
        return (
            f"trial {trial.number}  pruned after {count} value{'s' * (count != 1)} of {spec.metric}  {params}{taken}"
        )
    best = best_trial(study)
    mark = "  (best)" if best is not None and best.number == trial.number else ""
    return f"trial {trial.number}  {spec.metric} {_short(trial.value)}  {params}{taken}{mark}"


def rows_of(folder: SweepFolder, study: "Study", spec: SweepSpec) -> list[Row]:
    """Return all trials as they are now."""
    return [_row(folder, trial, spec) for trial in study.get_trials(deepcopy=False)]


def _row(folder: SweepFolder, trial: FrozenTrial, spec: SweepSpec) -> Row:
    names = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    state = names.get(trial.state, "waiting")
    duration = None if trial.duration is None else trial.duration.total_seconds()
    message = trial.user_attrs.get("error", "") if trial.state == TrialState.FAIL else ""
    row = Row(trial.number, state, trial.value, None, duration, trial.params, message)
    if trial.state == TrialState.RUNNING:
        row.state = "running" if folder.is_owned(trial.number) or not folder.has(trial.number) else "stopped"
        shares = [_progress(run) for run in folder.runs(trial.number, spec.seeds)]
        row.progress = sum(shares) / len(shares)
        values = trial.intermediate_values.values()
        row.value = (min(values) if spec.mode == "min" else max(values)) if values else None
        row.duration_s = None if trial.datetime_start is None else time.time() - trial.datetime_start.timestamp()
    return row


def _progress(run: Any) -> float:
    return (Monitor(run).read().progress or 0.0) if (run / CONFIG).is_file() else 0.0


def status_table(rows: list[Row], spec: SweepSpec) -> Table:
    """Return the trials as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    messages = any(row.message for row in rows)
    for title in (
        "trial",
        "state",
        spec.metric or "",
        "done",
        "time",
        *spec.space,
        *(["message"] if messages else []),
    ):
        table.add_column(title, overflow="fold")
    for row in rows:
        done = f"{row.progress:.0%}" if row.progress is not None else ""
        taken = "" if row.duration_s is None else _duration(row.duration_s)
        params = [printable(_short(row.params.get(key, "")), 60) for key in spec.space]
        cells = [str(row.number), row.state, "" if row.value is None else _short(row.value), done, taken, *params]
        table.add_row(*(Text(cell) for cell in [*cells, *([printable(row.message, 100)] if messages else [])]))
    return table


def summary(rows: list[Row], spec: SweepSpec, study: "Study") -> list[str]:
    """Return how far the sweep is, its best trial, and when it will be done."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    known = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [f"{len(rows)} of {spec.num_trials} trials" + (f": {known}" if known else "")]
    if (best := best_trial(study)) is not None:
        params = " ".join(f"{key}={_short(value)}" for key, value in best.params.items())
        lines.append(f"best: trial {best.number}, {spec.metric} {_short(best.value)}, {params}")
    if (left := left_s(rows, spec)) is not None:
        lines.append(f"about {_duration(left)} left")
    return lines


def left_s(rows: list[Row], spec: SweepSpec) -> float | None:
    """Estimate the seconds until the sweep is done, from the trials that are; None if none runs, or none is done.

    >>> spec = SweepSpec(experiment="x", space={"a": [1, 2]}, trials=6)
    >>> done, half = Row(0, "complete", 1.0, None, 10.0, {}), Row(1, "running", None, 0.5, 5.0, {})
    >>> left_s([done, half, half], spec)  # three and two halves of 10 seconds, two at a time
    20.0
    """
    ended = [row.duration_s for row in rows if row.state in ("complete", "pruned") and row.duration_s is not None]
    running = [row for row in rows if row.state == "running"]
    if not ended or not running:
        return None
    trials = spec.num_trials - len(rows) + sum(1.0 - (row.progress or 0.0) for row in running)
    trials += sum(row.state == "stopped" for row in rows)
    return trials * sum(ended) / len(ended) / len(running)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
