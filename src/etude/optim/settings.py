"""Schedules for parameter groups by name, and for settings of the optimizer other than the learning rate."""

from collections.abc import Mapping
from dataclasses import replace

from etude.config.registry import register
from etude.core.errors import ConfigError
from etude.optim.scheduled import Schedule, Schedules, Setting
from etude.optim.schedules import Inner, constant


@register("scheduler", "per_group")
def per_group(groups: Mapping[str, Inner], default: Inner | None = None) -> Schedules:
    """Give parameter groups their own schedules, by the names of `optimizer.groups`; `default` is for all others.

    Without `default` the rates of the others are constant. The name of a group includes its layers (`layer_decay`).

    >>> from etude.optim import cosine, linear
    >>> rates = per_group({"backbone": linear(10)}, default=cosine(10))
    >>> rates.of_group("backbone")(5), round(rates.of_group("head")(5), 6)
    (0.5, 0.5)
    """
    if not groups:
        raise ConfigError("per_group: no groups; name at least one")
    others = Schedules.of(constant() if default is None else default)
    for name, one in {**groups, **dict.fromkeys(others.groups, others)}.items():
        if isinstance(one, Schedules):
            raise ConfigError(f"per_group: the schedule of group '{name}' must be a single one, such as cosine")
    return replace(others, groups=dict(groups))


@register("scheduler", "by_setting")
def by_setting(
    lr: Inner | None = None,
    momentum: Inner | None = None,
    beta1: Inner | None = None,
    beta2: Inner | None = None,
    weight_decay: Inner | None = None,
) -> Schedules:
    """Schedule other settings of the optimizer beside the learning rate: each value is multiplied by its factor.

    `momentum` is also `beta1` of Adam. A setting without a schedule stays as it is.

    >>> from etude.optim import cosine, linear
    >>> both = by_setting(lr=cosine(10), weight_decay=linear(10, start=0.5, end=1.0))
    >>> both(0), both.factors["weight_decay"](0)
    (1.0, 0.5)
    """
    if momentum is not None and beta1 is not None:
        raise ConfigError("by_setting: momentum is beta1 of Adam; keep one of them")
    given: dict[Setting, Schedule | None] = {
        "momentum": momentum,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
    }
    factors = {name: one for name, one in given.items() if one is not None}
    rates = Schedules.of(constant() if lr is None else lr)
    for name, one in factors.items():
        if isinstance(one, Schedules):
            raise ConfigError(f"by_setting: the schedule of {name} must be a single one, such as cosine")
        same = {"momentum", "beta1"} if name in ("momentum", "beta1") else {name}  # of Adam they are one
        if same & {*rates.factors, *rates.values}:
            raise ConfigError(f"by_setting: the schedule of lr already sets {name}; keep one of them")
    if not factors:
        raise ConfigError("by_setting: no setting has a schedule; set momentum, beta1, beta2 or weight_decay")
    return replace(rates, factors={**rates.factors, **factors})
