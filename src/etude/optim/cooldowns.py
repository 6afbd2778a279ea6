"""Warm-up, plateau and cooldown; a cooldown alone."""

import math
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from etude.config.registry import register
from etude.core.arguments import checked
from etude.core.errors import ConfigError
from etude.optim.scheduled import Schedule
from etude.optim.schedules import Ratio, Steps, fit_warmup

Shape = Literal["linear", "sqrt", "cosine", "power"]
Power = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
_COOLDOWN = 0.2
"""Share of the run that is the cooldown by default."""


@register("scheduler", "cooldown")
@checked
def cooldown(
    total_steps: Steps, shape: Shape = "linear", min_lr_ratio: Ratio = 0.0, power: Power | None = None
) -> Schedule:
    """Fall from 1 to `min_lr_ratio` at `total_steps`: x is the share of the steps that are done.

    `linear` is 1−x, `sqrt` 1−√x, `cosine` half a cosine, and `power` (1−x) to the power `power`, 2 by default.

    >>> [round(cooldown(4, "sqrt")(step), 3) for step in range(6)]
    [1.0, 0.5, 0.293, 0.134, 0.0, 0.0]
    """
    if power is not None and shape != "power":
        raise ConfigError(
            f"cooldown: power is {power}, but shape is '{shape}'; set shape to 'power', or remove power"
        )
    exponent = 1.0 if shape == "linear" else 2.0 if power is None else power

    def factor(step: int) -> float:
        done = min(step / total_steps, 1.0)
        if shape == "sqrt":
            left = 1.0 - math.sqrt(done)
        elif shape == "cosine":
            left = 0.5 + 0.5 * math.cos(math.pi * done)
        else:
            left = (1.0 - done) ** exponent
        return min_lr_ratio + (1.0 - min_lr_ratio) * left

    return factor


@register("scheduler", "wsd")
@checked
def wsd(
    total_steps: Steps,
    warmup_steps: Annotated[int, Ge(0)] | None = None,
    warmup_fraction: Fraction | None = None,
    cooldown_steps: Annotated[int, Ge(0)] | None = None,
    cooldown_fraction: Fraction | None = None,
    shape: Shape = "sqrt",
    min_lr_ratio: Ratio = 0.0,
    power: Power | None = None,
) -> Schedule:
    """Rise linearly from 0, stay at 1, then cool down to `min_lr_ratio` at `total_steps`: warm-up, stable, decay.

    Lengths are in steps, or fractions of the run; by default there is no warm-up, and the cooldown is a fifth of the
    run. `shape` and `power` are those of `cooldown`. A warm-up that is not shorter than the run is shortened to a
    tenth of the run, with a warning.

    >>> [wsd(10, warmup_steps=2, cooldown_steps=4, shape="linear")(step) for step in range(11)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    rise = fit_warmup(_length("warmup", warmup_steps, warmup_fraction, 0.0, total_steps), total_steps)
    fall = _length("cooldown", cooldown_steps, cooldown_fraction, _COOLDOWN, total_steps)
    if warmup_fraction is not None and cooldown_steps is None:
        share = warmup_fraction + (_COOLDOWN if cooldown_fraction is None else cooldown_fraction)
        fall = min(fall, total_steps - rise) if share <= 1.0 else fall  # both may have been rounded up
    if (warmup_fraction or 0.0) + (cooldown_fraction or 0.0) > 1.0:
        raise ConfigError(
            f"wsd: warmup_fraction {warmup_fraction} and cooldown_fraction {cooldown_fraction} are more than the whole "
            "run together; lower one of them"
        )
    if rise + fall > total_steps:
        raise ConfigError(
            f"wsd: the warm-up of {rise} steps and the cooldown of {fall} are longer than the run of {total_steps} "
            "steps; shorten one of them, or train longer"
        )
    start, cool = total_steps - fall, cooldown(max(fall, 1), shape, min_lr_ratio, power)

    def factor(step: int) -> float:
        if step < rise:
            return step / rise
        return 1.0 if step < start or not fall else cool(step - start)

    return factor


def _length(part: str, steps: int | None, fraction: float | None, default: float, total_steps: int) -> int:
    """Return the steps of a part of the run."""
    if steps is not None and fraction is not None:
        raise ConfigError(
            f"wsd: {part}_steps and {part}_fraction both set the length of the {part}; keep one of them"
        )
    return steps if steps is not None else round(total_steps * (default if fraction is None else fraction))
