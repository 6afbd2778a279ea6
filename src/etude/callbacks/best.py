"""Follow the monitored metric of a run, and keep the weights of its best value."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Annotated, Any, NotRequired

from annotated_types import Ge
from torch import Tensor, nn

from etude.callbacks.monitored import with_other_names
from etude.checkpoint import check_kind, record_of
from etude.checkpoint.saved_tensor import copy_of
from etude.core import Clock, TrainingError
from etude.core.model import clean_state_dict
from etude.core.monitor import OTHER_NAMES, Best, Measured
from etude.core.spelling import suggest
from etude.engine.callback import Callback, Logs, RunInfo

_MEASURED = record_of(
    "Measured",
    {"value": float, "step": Annotated[int, Ge(0)], "epoch": Annotated[int, Ge(0)], "metrics": dict[str, float]},
)
_STATE = record_of(
    "BestMetric",
    {
        "last": _MEASURED | None,
        "best": _MEASURED | None,
        "may_come": bool,
        "metric": NotRequired[list[str]],  # older checkpoints lack it
    },
)


class BestMetric(Callback):
    """Records the last and the best value of the monitored metric, with their steps and epochs.

    With `keeps` the weights of the best value are kept: in a checkpoint, which it asks for, or in memory (`keeps` is
    "memory"). In a run of several phases only values of the last phase are compared.
    """

    def __init__(self, best: Best, *, required: bool = False, keeps: str | None = None) -> None:
        """`required` makes it an error if the metric is not reported."""
        super().__init__()
        self.best = best
        self.weights: dict[str, Tensor] | None = None
        """The weights of the best value, if they are kept in memory."""
        self._required, self._keeps = required, keeps
        self.load_best: Callable[[], str] | None = None
        """Called at the end of a run: loads the best weights into the model and returns a sentence about it."""
        self._clock = Clock()
        self._model: nn.Module | None = None
        self._is_main = True
        self._may_come = False

    def on_train_begin(self, run: RunInfo) -> None:
        """Take clock and model; a new run begins without values."""
        self._clock, self._model, self._is_main = run.clock, run.model, run.is_main
        self.best.restored = False
        if run.clock.step == 0:
            self.best.last = self.best.best = self.weights = None

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Forget the best value: metrics of different phases are not comparable."""
        self.best.best = self.weights = None
        self._may_come = facts["number"] < facts["phases"]

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Record a validation metric."""
        if self.best.name.startswith("val_"):
            self._record(epoch, metrics, metrics)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Record a training metric."""
        if not self.best.name.startswith("val_"):
            self._record(epoch, logs, {})

    def on_train_end(self, result: Logs) -> None:
        """Load the best weights, if they are kept and the run will not be resumed."""
        if self.load_best is not None and not self.control.interrupted:
            text = self.load_best()
            if self._is_main:
                self.notify(text, event="restore", step=self._clock.step)

    def outcome(self) -> Mapping[str, Any]:
        """Return name and mode of the metric, its last and its best value."""
        found = self.best.plain()
        return {"monitor": found.pop("name"), **found} if found else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the last and the best value."""
        found = self.best.plain()
        values = {"last": found.get("last"), "best": found.get("best"), "may_come": self._may_come}
        return {**values, "metric": self._metric()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; values of another metric or mode are not comparable, and are dropped."""
        check_kind(_STATE, {"may_come": False, **state}, "state")
        self._may_come = state.get("may_come", False)
        if state.get("metric", self._metric()) != self._metric():
            self.best.last = self.best.best = None
            return
        self.best.last, self.best.best = (
            None if state[name] is None else Measured(**state[name]) for name in ("last", "best")
        )

    def _metric(self) -> list[str]:
        return [min(self.best.name, OTHER_NAMES.get(self.best.name, self.best.name)), self.best.mode]

    def _record(self, epoch: int, logs: Logs, metrics: Logs) -> None:
        found = with_other_names(logs)
        if self.best.name not in found:
            if self._required and not self._may_come:
                known = suggest(self.best.name, sorted(logs))
                raise TrainingError(f"training.monitor: '{self.best.name}' is not reported{known}")
            return
        if self.best.add(found[self.best.name], self._clock.step, epoch + 1, metrics):
            if self._keeps == "memory" and self._model is not None:
                with nullcontext() if self._siblings is None else self._siblings.saving():
                    self.weights = copy_of_weights(self._model)
            elif self._keeps is not None:
                self.control.save = True


def copy_of_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state in host memory."""
    state = clean_state_dict(model)
    return {name: copy_of(value) for name, value in state.items() if isinstance(value, Tensor)}
