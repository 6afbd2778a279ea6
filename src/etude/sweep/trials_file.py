"""The trials of a sweep as plain JSON in its folder: who reads it, such as the dashboard, needs no optuna."""

import contextlib
import json
import math
import time
from typing import TYPE_CHECKING, Any

from etude.core.errors import ConfigError
from etude.core.files import write_text
from etude.monitor.jsonl import plain
from etude.monitor.reading import TRIALS
from etude.sweep.folder import SweepFolder
from etude.sweep.spec import SweepSpec

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

EVERY_S = 1.0
"""Seconds between two writings while trials only report values."""


class TrialsFile:
    """Writes `trials.json` while a sweep runs; several processes may do so."""

    def __init__(self, folder: SweepFolder, spec: SweepSpec, study: "Study", name: str) -> None:
        self.folder, self.spec, self.study, self.name = folder, spec, study, name
        self._importance: dict[str, float] | None = None
        self._written = -math.inf

    def write(self, *, ended: bool = False) -> None:
        """Write the trials as they are now; at once if one has `ended`. A full disk does not end the sweep."""
        if not ended and time.monotonic() - self._written < EVERY_S:
            return
        if ended or self._importance is None:
            self._importance = self._shares()
        self._written = time.monotonic()
        with contextlib.suppress(OSError), self.folder.locked():  # so that an older state never replaces a newer one
            write_text(self.folder.path / TRIALS, json.dumps(plain(self._content())) + "\n")

    def _shares(self) -> dict[str, float]:
        from etude.sweep.plot import importance

        try:
            return importance(self.study)
        except (ConfigError, ValueError, ArithmeticError):  # no trial is complete, or optuna cannot tell
            return {}

    def _content(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "metric": self.spec.metric,
            "mode": self.spec.mode,
            "total": self.spec.num_trials,
            "time": time.time(),
            "space": {key: _axis(values) for key, values in self.spec.space.items()},
            "importance": self._importance,
            "trials": [self._trial(trial) for trial in self.study.get_trials(deepcopy=False)],
        }

    def _trial(self, trial: "FrozenTrial") -> dict[str, Any]:
        from optuna.trial import TrialState

        names = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        names |= {TrialState.RUNNING: "running"}
        reported = trial.intermediate_values.values()
        best = (min if self.spec.mode == "min" else max)(reported, default=None)
        is_complete = trial.state == TrialState.COMPLETE
        runs = self.folder.runs(trial.number, self.spec.seeds)
        return {
            "number": trial.number,
            "state": names.get(trial.state, "waiting"),
            "value": trial.value if is_complete else best,
            "params": trial.params,
            "runs": [run.relative_to(self.folder.path).as_posix() for run in runs],
            "start": None if trial.datetime_start is None else trial.datetime_start.timestamp(),
            "end": None if trial.datetime_complete is None else trial.datetime_complete.timestamp(),
            "error": trial.user_attrs.get("error", ""),
        }


def _axis(values: Any) -> dict[str, Any]:
    """Return where the values of a key may be: `values`, or `low`, `high` and whether they are logarithmic."""
    if isinstance(values, list):
        from etude.sweep.space import labels_of

        return {"values": labels_of(values)}
    return {"low": values.low, "high": values.high, "log": values.log}
