"""The schedule `plateau`: reduce the learning rate when a metric no longer improves."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from etude.callbacks.monitored import Monitored
from etude.checkpoint import check_kind, record_of
from etude.config.registry import register
from etude.core import Clock, ConfigError
from etude.core.arguments import checked
from etude.core.monitor import Mode
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.engine.learning_rate import LearningRate
from etude.optim.scheduled import Schedules
from etude.optim.schedules import Inner, Ratio, constant

Count = Annotated[int, Ge(0)]
_STATE = record_of(
    "Plateau",
    {
        "scale": Ratio,
        "best": float | None,
        "num_bad": Count,
        "cooldown_left": Count,
        "checked_at": int,
        "monitored": dict[str, Any],
    },
)


@register("scheduler", "plateau")
@checked
def plateau(
    schedule: Inner | None = None,
    factor: Annotated[float, Gt(0), Lt(1)] = 0.1,
    patience: Count = 10,
    threshold: Annotated[float, Ge(0)] = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: Count = 0,
    min_lr_ratio: Ratio = 0.0,
    monitor: str | None = None,
    mode: Mode | None = None,
) -> Schedules:
    """Multiply all rates by `factor` after more than `patience` checks of a metric without an improvement.

    A metric of the validation is checked at every validation, another one at the end of every epoch. The arguments are
    those of torch's ReduceLROnPlateau, but `min_lr_ratio` is a share of the base rate; `monitor` is that of the run by
    default (`training.monitor`, or `val_loss`). The factor applies to the rates of `schedule`, which are constant by
    default, and stays if `schedule` is a warm-up. A new phase of the run restarts the count.
    """
    watcher = Plateau(factor, patience, threshold, threshold_mode, cooldown, min_lr_ratio, monitor, mode)
    rates = Schedules.of(constant() if schedule is None else schedule)
    if any(isinstance(one, Plateau) for one in rates.callbacks):
        raise ConfigError("plateau is inside plateau; remove one of them")
    return replace(rates, callbacks=(*rates.callbacks, watcher))


class Plateau(Callback):
    """Counts checks of a metric without an improvement, and reduces the rates of the run."""

    def __init__(
        self,
        factor: float,
        patience: int,
        threshold: float,
        threshold_mode: str,
        cooldown: int,
        min_lr_ratio: float,
        monitor: str | None,
        mode: Mode | None,
    ) -> None:
        super().__init__()
        self.factor, self.patience, self.cooldown, self.min_lr_ratio = factor, patience, cooldown, min_lr_ratio
        self.threshold, self.is_relative = threshold, threshold_mode == "rel"
        self.monitored = Monitored("plateau", monitor, mode)
        self._rate: LearningRate | None = None
        self._clock = Clock()
        self._is_main = self._has_validation = True
        self._reset()

    def _reset(self) -> None:
        self.scale = 1.0
        """The factor of all rates so far."""
        self.best: float | None = None
        self.num_bad = 0
        """Checks since the last improvement, reduction or cooldown."""
        self.cooldown_left = 0
        self._checked_at = -1

    def bind(self, parts: RunParts) -> None:
        """Remember the learning rate to scale."""
        self._rate, self._has_validation = parts.learning_rate, parts.val_loader is not None
        self._apply()

    def on_train_begin(self, run: RunInfo) -> None:
        """Start from the full rate in a new run; a resumed one keeps its factor."""
        self._clock, self._is_main = run.clock, run.is_main
        if self.monitored.begin(run):  # another metric than before
            self.best, self.num_bad = None, 0
        if self._watches_validation and not self._has_validation:
            raise ConfigError(
                f"plateau monitors '{self.monitored.name}', but there is no validation data; pass some, or set "
                "scheduler.monitor to a metric of training such as 'loss'"
            )
        if run.clock.step == 0:
            self._reset()
        self._apply()

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Restart the count: metrics of different phases are not comparable."""
        self.best, self.num_bad = None, 0
        self.monitored.begin_phase(facts)

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Check a metric of the validation."""
        if self._watches_validation:
            self._check(metrics)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Check another metric."""
        if not self._watches_validation:
            self._check(logs)

    @property
    def _watches_validation(self) -> bool:
        return self.monitored.name.startswith("val_")

    def on_train_end(self, result: Logs) -> None:
        """Warn if the metric was never reported."""
        self.monitored.warn_if_never_seen()

    def _check(self, logs: Logs) -> None:
        value, step = self.monitored.value(logs), self._clock.step
        if value is None or step == self._checked_at:  # a run resumed at the end of an epoch validates again
            return
        self._checked_at = step
        if self._improves(value):
            self.best, self.num_bad = float(value), 0
        else:
            self.num_bad += 1
        if self.cooldown_left > 0:
            self.cooldown_left, self.num_bad = self.cooldown_left - 1, 0
        if self.num_bad > self.patience:
            self.cooldown_left, self.num_bad = self.cooldown, 0
            self._reduce()

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value) or self.best is None:
            return math.isfinite(value)
        sign = 1.0 if self.monitored.mode == "max" else -1.0
        if self.is_relative:
            return sign * value > sign * self.best * (1.0 + sign * self.threshold)
        return sign * value > sign * self.best + self.threshold

    def _reduce(self) -> None:
        before, self.scale = self.scale, max(self.scale * self.factor, self.min_lr_ratio)
        self._apply()
        if self.scale < before and self._is_main:
            best = "" if self.best is None else f" (best {self.best:.6g})"
            words = f"{self.monitored.name} no longer improves{best}: learning rate x {self.scale:.3g} from now on"
            self.notify(words, event="plateau", step=self._clock.step)

    def _apply(self) -> None:
        if self._rate is not None:
            self._rate.scales["plateau"] = self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the counts."""
        return {
            "scale": self.scale,
            "best": self.best,
            "num_bad": self.num_bad,
            "cooldown_left": self.cooldown_left,
            "checked_at": self._checked_at,
            "monitored": self.monitored.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        check_kind(_STATE, state, "state")
        self.monitored.load_state_dict(state["monitored"])
        self.scale, self.best, self.num_bad = state["scale"], state["best"], state["num_bad"]
        self.cooldown_left, self._checked_at = state["cooldown_left"], state["checked_at"]
        self._apply()
