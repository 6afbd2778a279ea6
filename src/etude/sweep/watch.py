"""A trial that runs here: the values that its run records, what optuna is told of them, and how it ended."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from etude.core.errors import ConfigError
from etude.core.files import FolderLock
from etude.core.monitor import OTHER_NAMES
from etude.core.spelling import printable, suggest
from etude.monitor.reading import METRICS, RESULT, Follower, read_json
from etude.sweep.launch import TrialProcess

if TYPE_CHECKING:
    from optuna import Trial

INTERRUPTED = 130
"""Exit code of a process that was asked to stop."""
_NOT_METRICS = ("step", "epoch", "split", "time", "nonfinite", "phase")


class MetricMissing(ConfigError):
    """A run does not report the metric that is compared."""


class MetricReader:
    """The values of one metric that a run has recorded: of its validations, or of its epochs."""

    def __init__(self, run: Path, metric: str) -> None:
        self.metric = metric
        self._follower = Follower(run / METRICS)
        self._begin()

    def _begin(self) -> None:
        self._restarts = self._follower.restarts
        self._values: dict[str, list[float]] = {"val": [], "epoch": []}
        self._phases: dict[str, list[object]] = {"val": [], "epoch": []}
        """For every value the phase of its run, None if the run has no phases."""
        self.names: dict[str, None] = {}

    def read(self) -> list[float]:
        """Return all values so far; NaN where one was not finite. Raises MetricMissing if there is none."""
        while records := self._follower.read():
            if self._follower.restarts != self._restarts:  # the run was continued from an earlier step
                self._begin()
            for record in records:
                if (split := record.get("split")) in self._values:
                    self._add(split, record)
        return self.values

    def _add(self, split: str, record: dict[str, object]) -> None:
        self.names |= dict.fromkeys(name for name in record if name not in _NOT_METRICS)
        name = self.metric if self.metric in record else OTHER_NAMES.get(self.metric, self.metric)
        if name in record:
            value = record[name]
            self._values[split].append(float(value) if isinstance(value, (int, float)) else math.nan)
            self._phases[split].append(record.get("phase"))
            return
        belongs_here = split == ("val" if self.metric.startswith("val_") else "epoch")
        if belongs_here and not self.values and "phase" not in record:  # a later phase may report it
            self.refuse()

    def refuse(self) -> None:
        """Raise MetricMissing: no record has the metric."""
        raise MetricMissing(f"metric: the runs report no '{self.metric}'{suggest(self.metric, self.names)}")

    @property
    def values(self) -> list[float]:
        """The values so far."""
        return self._values["val"] or self._values["epoch"]

    @property
    def comparable(self) -> list[float]:
        """The values of the last phase: losses of other phases are of other tasks."""
        phases = self._phases["val"] or self._phases["epoch"]
        return [value for value, phase in zip(self.values, phases, strict=True) if phase == phases[-1]]


class RunningTrial:
    """A trial of this process, with its runs: one, or one for each seed, one after the other."""

    def __init__(self, trial: "Trial", runs: list[Path], lock: FolderLock, slot: int, metric: str, mode: str) -> None:
        self.trial, self.runs, self.lock, self.slot = trial, runs, lock, slot
        self._metric, self._best = metric, min if mode == "min" else max
        self.results: list[float] = []
        """The best value of every run that is finished."""
        self.process: TrialProcess | None = None
        self.is_pruned = False
        self.kills = 0
        """How often its process was killed."""
        self.waits = False
        """Whether an earlier process still writes to its folder."""
        self.reader = MetricReader(runs[0], metric)
        self._reported = dict(trial.study.trials[trial.number].intermediate_values)

    @property
    def run(self) -> Path:
        """The folder of the run that is trained now."""
        return self.runs[len(self.results)]

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return read_json(self.run / RESULT).get("status") == "finished"

    def report(self) -> None:
        """Tell optuna the new values of the first run, and stop it if the pruner says so.

        The step of a value is its number, from 0 on: with another batch size, the steps of training are others.
        """
        values = self.reader.read()
        if self.results or self.is_pruned:
            return
        for number, value in enumerate(values):
            if number not in self._reported and math.isfinite(value):
                self._reported[number] = value
                self.trial.report(value, number)
                if self.process is not None and self._should_prune() and not self.is_finished:
                    self.is_pruned = True
                    self.process.terminate()
                    return

    def _should_prune(self) -> bool:
        try:
            return self.trial.should_prune()
        except (ValueError, TypeError, ArithmeticError) as error:  # arguments that it did not check
            raise ConfigError(f"pruner: optuna cannot decide: {type(error).__name__}: {error}") from error

    def finish_run(self) -> str:
        """Record the best value of a finished run and go on to the next; return why there is none, or nothing."""
        if not self.reader.read():
            self.reader.refuse()
        finite = [value for value in self.reader.comparable if math.isfinite(value)]
        if not finite:
            return f"{self._metric} was never finite"
        self.results.append(self._best(finite))
        self.process, self.kills, self.is_pruned = None, 0, False
        if len(self.results) < len(self.runs):
            self.reader = MetricReader(self.run, self._metric)
        return ""

    def last_words(self, code: int) -> str:
        """Return the last line that the process of a failed run printed, or how it ended if a signal stopped it."""
        if code == INTERRUPTED:
            return "stopped by a signal"
        lines = [] if self.process is None else self.process.printed().split("\n")
        words = next((line for line in reversed(lines) if line.strip()), "")
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return printable(words.removeprefix("etude: "), 500) if code > 0 and words else ended
