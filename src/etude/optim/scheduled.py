"""What schedules are, and `Schedules`: one for each parameter group, for other settings, and driven by metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from etude.core.errors import ConfigError
from etude.core.spelling import suggest

Schedule = Callable[[int], float]
"""Maps the next step to a factor of the base learning rate, or of another setting of the optimizer."""

Setting = Literal["momentum", "beta1", "beta2", "weight_decay"]
"""Settings of an optimizer, beside its learning rate, that can be scheduled; `momentum` of Adam is `beta1`."""


def _unchanged(_: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Schedules:
    """The schedules of a run: `lr` for all parameter groups but those that have their own.

    It can be used where a schedule is; called with a step, it returns the factor of `lr`.

    >>> both = Schedules(lambda step: 0.5**step, groups={"head": lambda step: 1.0})
    >>> both(1), both.of_group("head")(1), both.of_group("head/layer_2")(1), both.of_group(None)(1)
    (0.5, 1.0, 1.0, 0.5)
    """

    lr: Schedule = _unchanged
    groups: Mapping[str, Schedule] = field(default_factory=dict)
    """By the name of the parameter group."""
    factors: Mapping[Setting, Schedule] = field(default_factory=dict)
    """Factors of other settings."""
    values: Mapping[Setting, Schedule] = field(default_factory=dict)
    """Other settings themselves, whatever their base value is."""
    callbacks: tuple[Any, ...] = ()
    """Callbacks of the run that change the rate further, for example by a metric."""

    @staticmethod
    def of(schedule: Schedule) -> "Schedules":
        """Return any schedule as `Schedules`."""
        return schedule if isinstance(schedule, Schedules) else Schedules(schedule)

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate of groups without a schedule of their own."""
        return self.lr(step)

    def of_group(self, name: str | None) -> Schedule:
        """Return the schedule of a parameter group; `backbone` includes `backbone/layer_3`."""
        return next((self.groups[key] for key in _prefixes(name) if key in self.groups), self.lr)

    def changed(self, rate: Callable[[Schedule], Schedule], other: Callable[[Schedule], Schedule]) -> "Schedules":
        """Return these schedules, those of learning rates changed by one function, those of settings by another."""
        return replace(
            self,
            lr=rate(self.lr),
            groups={name: rate(one) for name, one in self.groups.items()},
            factors={name: other(one) for name, one in self.factors.items()},
            values={name: other(one) for name, one in self.values.items()},
        )

    def check(self, groups: list[dict[str, Any]], optimizer: str) -> None:
        """Raise ConfigError for a group or a setting that an optimizer does not have."""
        known = list(dict.fromkeys(key for group in groups for key in _prefixes(group.get("name"))))
        for name in self.groups:
            if name not in known:
                there = suggest(name, known) if known else "; name groups under optimizer.groups"
                raise ConfigError(
                    f"the schedule has a group '{name}', which the optimizer does not have{there}; a group whose "
                    "parameters are all frozen is left out"
                )
        for setting in {**self.factors, **self.values}:
            own = [group for group in groups if has_setting(group, setting)]
            if setting in ("momentum", "beta1") and any("train_mode" in group for group in own):
                raise ConfigError(f"the schedule sets {setting}, by which {optimizer} mixes its averages; remove it")
            if not own:
                raise ConfigError(f"the schedule sets {setting}, which {optimizer} does not have; remove it")
            base = [group.get(f"initial_{setting}", setting_of(group, setting)) for group in own]
            if setting in self.factors and not any(base):
                raise ConfigError(f"the schedule multiplies {setting}, which is 0; set optimizer.{setting}")


def _prefixes(name: str | None) -> list[str]:
    """Return the name of a group and those of the groups that it is a part of.

    >>> _prefixes("backbone/layer_3")
    ['backbone/layer_3', 'backbone']
    """
    words = [] if name is None else name.split("/")
    return ["/".join(words[:count]) for count in range(len(words), 0, -1)]


# ------------------------------------------------------------------------------------- settings of parameter groups


def has_setting(group: Mapping[str, Any], setting: Setting) -> bool:
    """Return whether a parameter group has a setting."""
    return setting in group or (setting != "weight_decay" and "betas" in group)


def setting_of(group: Mapping[str, Any], setting: Setting) -> float:
    """Return a setting of a parameter group.

    >>> setting_of({"betas": (0.9, 0.99)}, "beta2"), setting_of({"betas": (0.9, 0.99)}, "momentum")
    (0.99, 0.9)
    """
    return float(group[setting] if setting in group else group["betas"][setting == "beta2"])


def set_setting(group: dict[str, Any], setting: Setting, value: float) -> None:
    """Set a setting of a parameter group."""
    if setting in group:
        group[setting] = value
    else:
        betas = list(group["betas"])
        betas[setting == "beta2"] = value
        group["betas"] = tuple(betas)
