"""Log the momentum and weight decay of every parameter group, and its learning rate."""

from typing import Any

from etude.config.registry import register
from etude.core import ConfigError
from etude.core.arguments import checked
from etude.engine.callback import Callback, Logs, RunInfo
from etude.optim.groups import group_names


@register("callback", "learning_rate_monitor")
class LearningRateMonitor(Callback):
    """Adds `lr`, `momentum` and `weight_decay` of all parameter groups to every log record.

    The rates of the first group, and of groups with a name or a rate of their own, are logged without it. With several
    groups the names are `lr/GROUP` and so on: the group's name, or its index. Momentum is `momentum` of an optimizer,
    or the first of its `betas`; what an optimizer does not have is not logged.
    """

    @checked
    def __init__(self, log_momentum: bool = True, log_weight_decay: bool = True) -> None:
        """Choose what is logged besides the rates."""
        super().__init__()
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self._run: RunInfo | None = None

    def acts_in_steps(self) -> bool:
        """True: without an optimizer there is nothing to log."""
        return True

    def on_train_begin(self, run: RunInfo) -> None:
        """Keep the optimizer."""
        if run.optimizer is None:
            raise ConfigError("LearningRateMonitor needs the optimizer: pass its method `step`, not another function")
        self._run = run

    def numbers(self) -> Logs:
        """Return the settings of the groups in the last step."""
        groups = [] if self._run is None or self._run.optimizer is None else self._run.optimizer.param_groups
        found: dict[str, float] = {}
        for name, group in zip(group_names(groups), groups, strict=True):
            end = f"/{name}" if len(groups) > 1 else ""
            values = {"lr": group["lr"]}
            if self.log_momentum:
                values["momentum"] = _momentum(group)
            if self.log_weight_decay:
                values["weight_decay"] = group.get("weight_decay")
            found |= {key + end: float(value) for key, value in values.items() if value is not None}
        return found


def _momentum(group: dict[str, Any]) -> Any:
    betas = group.get("betas")
    return group.get("momentum") if betas is None else betas[0]
