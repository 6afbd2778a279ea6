"""Shared by callbacks: the monitored metric, found in the logs by name, and the output path."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

from etude.checkpoint import check_kind, record_of
from etude.core import TrainingError
from etude.core.monitor import DEFAULT_MONITOR, OTHER_NAMES, Mode, mode_of, odd_mode
from etude.core.spelling import suggest
from etude.engine.callback import Logs, RunInfo

logger = logging.getLogger("etude")

_STATE = record_of(
    "Monitored",
    {
        "best": float | None,
        "best_epoch": int | None,
        "seen": bool,
        "may_come": NotRequired[bool],
        "metric": NotRequired[list[str]],
    },
)


def with_other_names(logs: Logs) -> dict[str, float]:
    """Return the metrics under their names and aliases: `accuracy` also as `acc`."""
    return {OTHER_NAMES[name]: value for name, value in logs.items() if name in OTHER_NAMES} | dict(logs)


class Monitored:
    """A named metric and its best value so far. `acc` and `accuracy` are one name.

    >>> watched = Monitored("EarlyStopping", "val_acc", "max")
    >>> watched.update(0, {"val_accuracy": 0.91}), watched.update(1, {"val_accuracy": 0.90})
    (True, False)
    >>> watched.best, watched.best_epoch
    (0.91, 0)
    """

    def __init__(self, owner: str, name: str | None, mode: Mode | None, min_delta: float = 0.0) -> None:
        """Without name and mode it is the metric that the run monitors, or `val_loss`."""
        self._is_of_run = name is None and mode is None
        self.name = DEFAULT_MONITOR if name is None else name
        self.mode, self.min_delta = mode_of(self.name, mode, owner), min_delta
        self._owner = owner
        self._loaded: list[str] | None = None
        """The metric and the mode of the values that were loaded."""
        self.reset()

    def begin(self, run: RunInfo) -> bool:
        """Take the metric that the run monitors, unless another one is set; a new run begins without values.

        So does one that is resumed with another metric or mode: the answer is whether there were values of another.
        """
        if self._is_of_run and run.best is not None:
            self.name, self.mode = run.best.name, run.best.mode
        elif run.is_main and (odd := odd_mode(self.name, self.mode)) is not None:
            logger.warning("%s: %s", self._owner, odd)
        is_other = self._loaded not in (None, self._metric())
        if run.clock.step == 0 or is_other:
            self.reset()
        self._loaded = None
        return is_other

    def _metric(self) -> list[str]:
        return [min(self.name, OTHER_NAMES.get(self.name, self.name)), self.mode]

    def reset(self) -> None:
        """Reset all values."""
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._seen = self._has_asked = False
        self._may_come = False

    def begin_phase(self, facts: Mapping[str, Any]) -> None:
        """Reset the best value: metrics of different phases of a run are not comparable.

        A metric that has never been reported is not an error before the last phase: a later phase may report it.
        """
        self.best = self.best_epoch = None
        self._may_come = facts["number"] < facts["phases"]

    def value(self, logs: Logs) -> float | None:
        """Return the metric; None for a validation metric in an epoch without validation.

        Raises TrainingError if no metric of that name has ever been reported.
        """
        self._has_asked = True
        name = self.name if self.name in logs else OTHER_NAMES.get(self.name, self.name)
        if name in logs:
            self._seen = True
            return logs[name]
        validated = any(key.startswith("val_") for key in logs)
        if self._seen or self._may_come or (self.name.startswith("val_") and not validated):
            return None
        known = suggest(self.name, sorted(logs))
        raise TrainingError(f"{self._owner} monitors '{self.name}', which is not reported{known}")

    def update(self, epoch: int, logs: Logs) -> bool | None:
        """Record the metric of this epoch: True if it is the best so far, False if not, None if there is none.

        A non-finite value is never the best.
        """
        value = self.value(logs)
        if value is None:
            return None
        if not math.isfinite(value) or not self._improves(value):
            return False
        self.best, self.best_epoch = float(value), epoch
        return True

    def warn_if_never_seen(self) -> None:
        """Warn at the end of a run if the metric was never reported, so that the callback did nothing.

        There is no warning for a run that was stopped in its first epoch.
        """
        if self._has_asked and not self._seen:
            logger.warning(
                f"{self._owner} did nothing: '{self.name}' was never reported, because there was no validation; "
                "pass validation data or monitor a training metric"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its epoch, and of which metric it is."""
        values = {"best": self.best, "best_epoch": self.best_epoch, "seen": self._seen, "may_come": self._may_come}
        return {**values, "metric": self._metric()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        check_kind(_STATE, state, "monitored")
        self.best, self.best_epoch, self._seen = state["best"], state["best_epoch"], state["seen"]
        self._may_come, self._loaded = (
            state.get("may_come", False),
            state.get("metric"),
        )  # older checkpoints lack them

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta


def resolve(path: str | Path, run: RunInfo | None) -> Path:
    """Return `path`, inside the run folder if it is relative and there is one."""
    return Path(path) if run is None or run.run_dir is None else run.run_dir / path
