"""The learning rate of every step, and other settings of the optimizer that have a schedule."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from etude.core import TrainingError
from etude.optim.scheduled import Schedule, Schedules, Setting, has_setting, set_setting, setting_of
from etude.optim.several import optimizers_in


class LearningRate:
    """Sets the learning rate of every parameter group to its base rate times the factor of its schedule.

    The base rate of a group is its `initial_lr`, as with torch's schedulers; a group without one gets its rate before
    the first step. It is saved and loaded with the optimizer, and so are base values of other scheduled settings
    (`initial_weight_decay` …). Without a schedule and `scales` the rates are not changed: they are constant, or user
    code sets them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, schedule: Schedule | None) -> None:
        """Without an optimizer it does nothing."""
        self.optimizer = optimizer
        self.scales: dict[str, float] = {}
        """Further factors of every rate, by the name of what sets them."""
        self.use(schedule)
        # A checkpoint loaded before the first step may contain rates already changed by a schedule.
        self._made = [] if optimizer is None else [_settings_of(group) for group in optimizer.param_groups]

    def use(self, schedule: Schedule | None) -> None:
        """Follow a schedule; raise ConfigError if it names a group or a setting that the optimizer does not have."""
        self.schedule = schedule
        self._plan = Schedules() if schedule is None else Schedules.of(schedule)
        self._different: list[Schedule] = []
        """The different schedules of the groups."""
        self._which: list[int] = []
        """Which of them each group has."""
        if schedule is not None and self.optimizer is not None:
            names = [type(one).__name__ for one in optimizers_in(self.optimizer)]
            self._plan.check(self.optimizer.param_groups, " + ".join(dict.fromkeys(names)))
        self.loaded()

    def set(self, step: int) -> Sequence[str]:
        """Set the rates and settings of the next step; return the settings, other than rates, that have changed."""
        if self.optimizer is None or (self.schedule is None and not self.scales):
            return ()
        groups = self.optimizer.param_groups
        if len(self._which) != len(groups):  # groups may be added during training
            self._assign(groups)
        scale = math.prod(self.scales.values()) if self.scales else 1.0
        factors = [scale * _factor(one, step) for one in self._different]
        for place, group in enumerate(groups):
            rate, factor = group["lr"], factors[self._which[place]]
            base = group["initial_lr"] if "initial_lr" in group else self._base(place, group, "lr")
            if not isinstance(rate, Tensor):
                group["lr"] = float(base) * factor
            elif isinstance(base, Tensor):
                rate.copy_(base).mul_(factor)  # reading it would synchronise
            else:
                rate.fill_(base * factor)
        return self._set_others(step) if self._plan.factors or self._plan.values else ()

    def loaded(self) -> None:
        """Set settings that an earlier schedule has changed, and this one does not, to their base values.

        To be called when a checkpoint has been loaded.
        """
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            for name in get_args(Setting):
                if name not in {**self._plan.factors, **self._plan.values} and f"initial_{name}" in group:
                    set_setting(group, name, group.pop(f"initial_{name}"))

    def others(self) -> dict[str, float]:
        """Return the current values of scheduled settings other than rates, for the logs."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        found = {
            name: [setting_of(group, name) for group in groups if has_setting(group, name)]
            for name in (*self._plan.factors, *self._plan.values)
        }
        return {name: max(values) for name, values in found.items() if values}

    def _assign(self, groups: list[dict[str, Any]]) -> None:
        """Find the schedule of every group."""
        own = [self._plan.of_group(group.get("name")) for group in groups]
        different = {id(one): one for one in own}
        self._different, places = list(different.values()), list(different)
        self._which = [places.index(id(one)) for one in own]

    def _set_others(self, step: int) -> list[str]:
        assert self.optimizer is not None
        plan, changed = self._plan, list[str]()
        for name, schedule in {**plan.factors, **plan.values}.items():
            factor = _factor(schedule, step)
            for place, group in enumerate(self.optimizer.param_groups):
                if not has_setting(group, name):
                    continue
                value = factor if name in plan.values else float(self._base(place, group, name)) * factor
                if value == setting_of(group, name):
                    continue
                if name != "weight_decay" and value >= 1:
                    raise TrainingError(f"the schedule gave {name} {value:g} for step {step}; it must be below 1")
                set_setting(group, name, value)
                changed += [name] if name not in changed else []
        return changed

    def _base(self, place: int, group: dict[str, Any], name: Any) -> Tensor | float:
        key = f"initial_{name}"
        if key not in group:  # a group added later has not been scheduled yet
            made = self._made[place] if place < len(self._made) else _settings_of(group)
            group[key] = made["lr"] if name == "lr" else setting_of(made, name)
        base: Tensor | float = group[key]
        return base


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that may be scheduled."""
    others = ("momentum", "betas", "weight_decay")
    return {"lr": float(group["lr"]), **{name: group[name] for name in others if name in group}}


def _factor(schedule: Schedule, step: int) -> Any:
    factor: Any = schedule(step)
    if isinstance(factor, Tensor) and not factor.is_cpu:  # reading it would synchronise
        return factor
    if not _is_factor(factor):
        raise TrainingError(
            f"the schedule gave {factor!r:.60} for step {step}; return a finite factor of at least 0 for every "
            "step of the run"
        )
    return float(factor)  # NumPy's numbers would make the rate one of them


def _is_factor(value: Any) -> bool:
    try:
        return bool(0 <= value < math.inf)
    except TypeError:
        return False
