"""Everything about one run but its metrics, and what differs between runs."""

import os
from pathlib import Path
from typing import Any

from etude.core.run_layout import DIFF
from etude.dashboard.catalogue import Run, bounded
from etude.dashboard.parsing import parse
from etude.monitor.reading import ENVIRONMENT, EVENTS, RESULT, flat, last_lines, read_json

MOST_EVENTS = 5000
_EVENT_BYTES = 4 << 20
_DIFF_BYTES = 1 << 20


NO_DETAILS: dict[str, Any] = {"config": {}, "env": {}, "git_diff": None, "result": {}, "events": [], "names": {}}
"""Those of a run whose files must not be opened."""


def details(run: Run) -> dict[str, Any]:
    """Return config, environment, uncommitted changes, result and events of a run."""
    return {
        "config": run.config(),
        "env": bounded(read_json(run.path / ENVIRONMENT)),
        "git_diff": read_diff(run.path),
        "result": bounded(read_json(run.path / RESULT)),
        "events": parse(last_lines(run.path / EVENTS, _EVENT_BYTES))[-MOST_EVENTS:],
        "names": run.names,
    }


def read_diff(run: Path) -> str | None:
    """Return the changes to tracked files that the run was started with; None if there are none."""
    try:
        descriptor = os.open(run / DIFF, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_DIFF_BYTES).decode(errors="replace")
    except OSError:
        return None


def differences(runs: list[Run]) -> dict[str, Any]:
    """Return the settings, environment and commits in which runs differ; None where a run has none."""
    environments = [bounded(read_json(run.path / ENVIRONMENT)) for run in runs]
    commits = [_git(one, run) for one, run in zip(environments, runs, strict=True)]
    rest = [{key: value for key, value in one.items() if key not in ("git", "time")} for one in environments]
    return {
        "config": _differing([flat(run.config()) for run in runs]),
        "env": _differing([flat(one) for one in rest]),
        "git": _differing(commits),
    }


def _git(environment: dict[str, Any], run: Run) -> dict[str, Any]:
    git = environment.get("git")
    return {**(git if isinstance(git, dict) else {}), "diff": read_diff(run.path)}


def _differing(all_values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = dict.fromkeys(key for values in all_values for key in values)
    rows = [{"key": key, "values": [values.get(key) for values in all_values]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"][1:])]
