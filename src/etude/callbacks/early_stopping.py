"""Stop a run whose monitored metric no longer improves."""

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge

from etude.callbacks.monitored import Monitored
from etude.checkpoint import check_kind, record_of
from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.monitor import Mode
from etude.engine.callback import Callback, Logs, RunInfo

_STATE = record_of("EarlyStopping", {"wait": Annotated[int, Ge(0)], "monitored": dict[str, Any]})


@register("callback", "early_stopping")
class EarlyStopping(Callback):
    """Stops after `patience` consecutive epochs without an improvement of more than `min_delta`.

    `monitor` is that of the run by default (`training.monitor`, or `val_loss`), and `mode` follows from a known name.
    Epochs without validation are not counted if a validation metric is monitored. NaN is not an improvement. A new
    phase of the run restarts the count.

    >>> from etude.engine.callback_list import CallbackList
    >>> callbacks = CallbackList([EarlyStopping(monitor="loss", patience=2)])
    >>> for epoch, loss in enumerate([0.5, 0.4, 0.4, 0.41]):
    ...     callbacks.on_epoch_end(epoch, {"loss": loss})
    >>> callbacks.control.stop, callbacks.control.reason
    (True, 'loss has not improved for 2 epochs (best 0.4 in epoch 2)')
    """

    @checked
    def __init__(
        self,
        monitor: str | None = None,
        patience: Annotated[int, Ge(0)] = 10,
        mode: Mode | None = None,
        min_delta: Annotated[float, Ge(0.0)] = 0.0,
    ) -> None:
        super().__init__()
        self.patience = patience
        self.monitored = Monitored("EarlyStopping", monitor, mode, min_delta)
        self.wait = 0
        """Epochs since the last improvement."""

    def on_train_begin(self, run: RunInfo) -> None:
        """Reset the count for a new run or another metric; a resumed run keeps it."""
        if self.monitored.begin(run) or run.clock.step == 0:
            self.wait = 0

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Restart the count: metrics of different phases are not comparable."""
        self.wait = 0
        self.monitored.begin_phase(facts)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Compare with the best epoch so far."""
        improved = self.monitored.update(epoch, logs)
        if improved is None:
            return
        self.wait = 0 if improved else self.wait + 1
        if not improved and self.wait >= self.patience:
            self.control.request_stop(self._reason())

    def on_train_end(self, result: Logs) -> None:
        """Warn if the metric was never reported."""
        self.monitored.warn_if_never_seen()

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the best value."""
        return {"wait": self.wait, "monitored": self.monitored.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        check_kind(_STATE, state, "state")
        self.monitored.load_state_dict(state["monitored"])
        self.wait = state["wait"]

    def _reason(self) -> str:
        best, epoch = self.monitored.best, self.monitored.best_epoch
        epochs = f"{self.wait} epoch{'s' * (self.wait != 1)}"
        found = "no finite value yet" if best is None or epoch is None else f"best {best:.6g} in epoch {epoch + 1}"
        return f"{self.monitored.name} has not improved for {epochs} ({found})"
