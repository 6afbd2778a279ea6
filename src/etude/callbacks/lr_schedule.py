"""Step a learning-rate scheduler of torch or timm from the hooks of a run."""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NotRequired, Protocol, runtime_checkable

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from etude.callbacks.monitored import Monitored
from etude.checkpoint import check_kind, pack, record_of, unpack
from etude.core import CheckpointError, Clock, ConfigError, StepReport, TrainingError
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.optim.several import everything_in

logger = logging.getLogger("etude")

_STATE = record_of(
    "LRSchedule",
    {
        "scheduler": dict[str, Any],
        "tensors": NotRequired[dict[str, Any]],
        "monitored": dict[str, Any] | None,
        "kind": NotRequired[str],  # older checkpoints lack it
    },
)


_ROUNDING = 1e-12
"""LinearLR to 0 may end this far below 0."""


@runtime_checkable
class CountedScheduler(Protocol):
    """A scheduler that is given the number of epochs and updates, as those of timm are."""

    optimizer: Any

    def step(self, epoch: int) -> None:
        """Set the rates after this many epochs, if it counts in epochs."""

    def step_update(self, num_updates: int) -> None:
        """Set the rates after this many updates, if it counts in updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore its state."""


class LRSchedule(Callback):
    """Steps a scheduler of `torch.optim.lr_scheduler` after every epoch or every optimizer step.

    A scheduler of timm is given both, and follows what it was made for. `ReduceLROnPlateau` needs `monitor`, the
    name of a metric; epochs without that metric do not count. A new phase of the run restarts the count.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule = LRSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), monitor="loss")
    >>> for epoch, loss in enumerate([0.5, 0.4, 0.6]):
    ...     schedule.on_epoch_end(epoch, {"loss": loss})
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """

    def __init__(
        self,
        scheduler: LRScheduler | ReduceLROnPlateau | CountedScheduler,
        interval: Literal["epoch", "step"] = "epoch",
        monitor: str | None = None,
    ) -> None:
        super().__init__()
        if interval not in ("epoch", "step"):
            raise ConfigError(f"LRSchedule: interval must be 'epoch' or 'step', found {interval!r}")
        watches = isinstance(scheduler, ReduceLROnPlateau)
        if watches and (monitor is None or interval == "step"):
            raise ConfigError("LRSchedule: ReduceLROnPlateau needs monitor, such as 'val_loss', and interval='epoch'")
        if monitor is not None and not watches:
            raise ConfigError(f"LRSchedule: {type(scheduler).__name__} uses no metric; remove monitor")
        self._counts = isinstance(scheduler, CountedScheduler)
        if self._counts and any(isinstance(one, ReduceLROnPlateau) for one in vars(scheduler).values()):
            raise ConfigError(
                f"LRSchedule: {type(scheduler).__name__} saves only a part of its state; name the scheduler 'plateau'"
            )
        self.scheduler: Any = scheduler
        self.interval = interval
        self._clock = Clock()
        self.monitored: Monitored | None = None
        """The metric of ReduceLROnPlateau."""
        if monitor is not None and isinstance(scheduler, ReduceLROnPlateau):
            self.monitored = Monitored("LRSchedule", monitor, scheduler.mode)

    def bind(self, parts: RunParts) -> None:
        """Raise ConfigError if a schedule of the run sets the rate of every step."""
        if parts.has_schedule:
            raise ConfigError(
                "both LRSchedule and a schedule set the learning rate; remove one of them (training.warmup_steps, "
                "use_scheduler and scheduler_type define a schedule)"
            )

    def acts_in_steps(self) -> bool:
        """Return whether it is stepped in every step."""
        return self.interval == "step" or self._counts

    def on_train_begin(self, run: RunInfo) -> None:
        """Check that the scheduler belongs to the optimizer that trains."""
        theirs, self._clock = self.scheduler.optimizer, run.clock
        if run.optimizer is not None and not any(theirs is one for one in everything_in(run.optimizer)):
            raise TrainingError(
                "LRSchedule belongs to another optimizer than the one that trains; build the scheduler from the "
                "optimizer given to the trainer"
            )
        if self.monitored is not None and self.monitored.begin(run):  # another metric than before
            self._restart()

    def on_phase_begin(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Restart a scheduler that waits for improvement: metrics of different phases are not comparable."""
        if self.monitored is not None:
            self.monitored.begin_phase(facts)
            self._restart()

    def _restart(self) -> None:
        self.scheduler.best, self.scheduler.num_bad_epochs = self.scheduler.mode_worse, 0

    def on_step_begin(self, step: int) -> None:
        """Raise TrainingError for a negative or infinite rate, which torch would use."""
        for group in self.scheduler.optimizer.param_groups:
            rate = group["lr"]
            if not isinstance(rate, Tensor) and not -_ROUNDING <= rate < math.inf:
                raise TrainingError(
                    f"LRSchedule: {type(self.scheduler).__name__} gave the learning rate {rate:.4g} for step {step}; "
                    "it must be finite and at least 0 in every step of the run"
                )

    def on_step_end(self, report: StepReport) -> None:
        """Set the rate of the next step."""
        if self._counts:
            self.scheduler.step_update(self._clock.step)
        elif self.interval == "step":
            self._advance()

    def _advance(self) -> None:
        try:
            self.scheduler.step()
        except ValueError as error:  # OneCycleLR ends
            name = type(self.scheduler).__name__
            raise TrainingError(f"LRSchedule: {name}: {error}; make it as long as the run") from error

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Set the rate of the next epoch."""
        if self._counts:
            self.scheduler.step(epoch + 1)
        elif self.interval == "step":
            return
        elif self.monitored is None:
            self._advance()
        elif (value := self.monitored.value(logs)) is not None:
            self.scheduler.step(value)

    def on_train_end(self, result: Logs) -> None:
        """Warn if the monitored metric was never reported."""
        if self.monitored is not None:
            self.monitored.warn_if_never_seen()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        monitored = self.monitored.state_dict() if self.monitored is not None else None
        # Counters with integer keys (milestones) and infinities (best so far) cannot be stored as JSON.
        tensors, structure = pack(self.scheduler.state_dict(), "scheduler")
        held = {name: tensor.clone() for name, tensor in tensors.items()}
        return {"scheduler": structure, "tensors": held, "monitored": monitored, "kind": self._kind}

    @property
    def _kind(self) -> str:
        return type(self.scheduler).__name__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scheduler with its settings, and the rate it had set; warn if they were others than now."""
        check_kind(_STATE, state, "state")
        held = unpack(state.get("tensors", {}), state["scheduler"])
        saved = _fitting(held, own := self.scheduler.state_dict(), "scheduler")
        if self.monitored is not None and state["monitored"] is not None:
            self.monitored.load_state_dict(state["monitored"])
            saved = {**saved, "mode": self.monitored.mode}
        self._warn_of_kept(saved, own, state.get("kind", self._kind))
        self.scheduler.load_state_dict(saved)
        if not self._counts:  # timm's keeps the rates in the optimizer alone
            self._set_rates(self.scheduler.get_last_lr())

    def _warn_of_kept(self, saved: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> None:
        """Warn if a checkpoint has another scheduler, or other settings, which will replace those of this one."""
        changed = ", ".join(_changed(type(self.scheduler), saved, own))
        if kind != self._kind:
            words = "the checkpoint is that of a run with %s: %s continues from its count of steps and its rates"
            logger.warning(words, kind, self._kind)
        elif changed:
            words = "%s continues with the settings of the checkpoint: %s; to change them, use a function of the step"
            logger.warning(words, self._kind, changed)

    def _set_rates(self, rates: list[float]) -> None:
        for group, lr in zip(self.scheduler.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _changed(kind: type, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield "gamma 0.5, not 0.1" for the arguments and base rates that a saved state will replace."""
    for name in (*inspect.signature(kind).parameters, "base_lrs"):
        before, now = (_plain(one.get(name)) for one in (saved, own))
        if name != "last_epoch" and name in saved and before != now:
            yield f"{name} {before}, not {now}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _fitting(saved: Any, own: Any, place: str) -> Any:
    """Return the entries of a saved state that the scheduler has; raise CheckpointError for a wrong type.

    torch would set every key as an attribute, without checks.
    """
    if isinstance(own, Counter) and isinstance(saved, dict) and all(isinstance(n, int) for n in saved.values()):
        return Counter(saved)
    if isinstance(own, dict) and not isinstance(own, Counter) and isinstance(saved, dict):
        return {key: _fitting(value, own[key], f"{place}.{key}") for key, value in saved.items() if key in own}
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        return [_fitting(one, other, f"{place}.{i}") for i, (one, other) in enumerate(zip(saved, own, strict=True))]
    numbers = isinstance(own, (int, float, Tensor)) and not isinstance(own, bool)
    kinds = (int, float, Tensor) if numbers else type(own)
    if own is not None and (not isinstance(saved, kinds) or (numbers and isinstance(saved, bool))):
        raise CheckpointError(f"{place}: found {saved!r:.60}, the scheduler has {own!r:.60}")
    return saved
