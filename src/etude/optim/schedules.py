"""Learning-rate schedules: pure functions from the next step (counted from 0) to a factor of the base rate.

A schedule holds no state, so a resumed run needs only its step number. Lengths are in steps unless `unit: epoch` is
set. In an experiment file `total_steps` and `steps_per_epoch` default to those of the run; a schedule that starts
later, after a warm-up or in a sequence, gets the remaining steps. After `total_steps` a schedule keeps its last
value.
"""

import functools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from etude.config.registry import Section, register
from etude.core.arguments import checked
from etude.core.errors import ConfigError
from etude.optim.scheduled import Schedule, Schedules

logger = logging.getLogger("etude")

Unit = Literal["step", "epoch"]
Steps = Annotated[int, Ge(1)]
Ratio = Annotated[float, Ge(0), Le(1)]
Gamma = Annotated[float, Gt(0), Le(1)]
Momentum = Annotated[float, Ge(0), Lt(1)]
Inner = Annotated[Schedule, Section("scheduler")]


def cosine_schedule_with_warmup(
    step: int, base_lr: float, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.1
) -> float:
    """Return the learning rate at `step`: linear from 0 to `base_lr`, then a half cosine to `min_lr_ratio` of it.

    A warm-up that is not shorter than the run is shortened as in `warmup_cosine`, with one warning.

    >>> [round(cosine_schedule_with_warmup(s, 2.0, 10, 30), 4) for s in (0, 5, 10, 20, 30, 99)]
    [0.0, 1.0, 2.0, 1.1, 0.2, 0.2]
    """
    if warmup_steps < 0 or total_steps < 1:  # not by `checked`, which takes 13 µs: this is called in every step
        raise ConfigError(
            f"warmup_steps is {warmup_steps} and total_steps is {total_steps}; they must be at least 0 and 1"
        )
    if not (step >= 0 and base_lr >= 0 and 0 <= min_lr_ratio <= 1):
        raise ConfigError(
            f"step is {step}, base_lr is {base_lr} and min_lr_ratio is {min_lr_ratio}; they must be at least 0, and "
            "the ratio at most 1"
        )
    warmup_steps = _fit_warmup_once(warmup_steps, total_steps)
    return base_lr * _warmup_cosine(step, warmup_steps, total_steps, min_lr_ratio)


@register("scheduler", "warmup_cosine")
@checked
def warmup_cosine(
    total_steps: Steps, warmup_steps: Annotated[int, Ge(0)] = 2000, min_lr_ratio: Ratio = 0.1
) -> Schedule:
    """Rise linearly from 0 over `warmup_steps`, then fall along a half cosine to `min_lr_ratio` at `total_steps`.

    A warm-up that is not shorter than the run is shortened to a tenth of the run, with a warning.
    """
    warmup_steps = fit_warmup(warmup_steps, total_steps)
    return lambda step: _warmup_cosine(step, warmup_steps, total_steps, min_lr_ratio)


@register("scheduler", "constant")
@checked
def constant(factor: Ratio = 1.0) -> Schedule:
    """Stay at `factor` times the base rate."""
    return lambda _: factor


@register("scheduler", "step")
@register("scheduler", "step_decay")
@checked
def step_decay(
    step_size: Steps, gamma: Gamma = 0.1, unit: Unit = "step", steps_per_epoch: Steps | None = None
) -> Schedule:
    """Multiply by `gamma` after every `step_size` steps or epochs.

    >>> [step_decay(step_size=2, gamma=0.5)(step) for step in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    period = step_size * _unit_steps("step_decay", unit, steps_per_epoch)
    return lambda step: gamma ** (step // period)


@register("scheduler", "multistep")
@checked
def multistep(
    milestones: Sequence[Steps], gamma: Gamma = 0.1, unit: Unit = "step", steps_per_epoch: Steps | None = None
) -> Schedule:
    """Multiply by `gamma` at each milestone."""
    ends = _ends("multistep", milestones, unit, steps_per_epoch)
    return lambda step: gamma ** bisect_right(ends, step)


@register("scheduler", "exponential")
@checked
def exponential(gamma: Gamma, unit: Unit = "step", steps_per_epoch: Steps | None = None) -> Schedule:
    """Multiply by `gamma` after every step, or after every epoch."""
    period = _unit_steps("exponential", unit, steps_per_epoch)
    return lambda step: gamma ** (step // period)


@register("scheduler", "cosine")
@register("scheduler", "cosine_annealing")
@checked
def cosine(total_steps: Steps, min_lr_ratio: Ratio = 0.0, start: Ratio = 1.0) -> Schedule:
    """Change along a half cosine from `start` to `min_lr_ratio` at `total_steps`."""
    return lambda step: _cosine(step / total_steps, start, min_lr_ratio)


@register("scheduler", "linear")
@checked
def linear(total_steps: Steps, end: Ratio = 0.0, start: Ratio = 1.0) -> Schedule:
    """Change linearly from `start` to `end` at `total_steps`."""
    return lambda step: _line(step / total_steps, start, end)


@register("scheduler", "polynomial")
@checked
def polynomial(total_steps: Steps, power: Annotated[float, Gt(0)] = 1.0, end: Ratio = 0.0) -> Schedule:
    """Fall from 1 to `end` at `total_steps` as a power of the remaining time."""
    return lambda step: end + (1.0 - end) * (1.0 - min(step, total_steps) / total_steps) ** power


@register("scheduler", "one_cycle")
@checked
def one_cycle(
    total_steps: Steps,
    pct_start: Ratio = 0.3,
    div_factor: Annotated[float, Ge(1)] = 25.0,
    final_div_factor: Annotated[float, Ge(1)] = 1e4,
    anneal: Literal["cos", "linear"] = "cos",
    cycle_momentum: bool = False,
    base_momentum: Momentum | None = None,
    max_momentum: Momentum | None = None,
) -> Schedule:
    """Rise from 1/div_factor to 1 in the first `pct_start` of the run, then fall to 1/(div_factor·final_div_factor).

    The base rate is the highest rate of the cycle. The curve is that of torch's OneCycleLR. With `cycle_momentum` the
    momentum, or beta1, falls from `max_momentum` (0.95) to `base_momentum` (0.85) while the rate rises, and rises again
    after it.
    """
    low, curve = 1.0 / div_factor, _cosine if anneal == "cos" else _line
    rate = _cycle(total_steps, pct_start, curve, low, 1.0, low / final_div_factor)
    if not cycle_momentum:
        if base_momentum is not None or max_momentum is not None:
            raise ConfigError("one_cycle: base_momentum and max_momentum need cycle_momentum; set it to true")
        return rate
    high, low = 0.95 if max_momentum is None else max_momentum, 0.85 if base_momentum is None else base_momentum
    momentum = _cycle(total_steps, pct_start, curve, high, low, high)
    return Schedules(rate, values={"momentum": momentum})


def _cycle(
    total_steps: int, pct_start: float, curve: Callable[..., float], first: float, top: float, final: float
) -> Schedule:
    """Go from `first` to `top` in the first `pct_start` of the run, then to `final`."""
    peak, last = pct_start * total_steps - 1.0, total_steps - 1.0

    def factor(step: int) -> float:
        if step < peak:
            return curve(step / peak, first, top)
        if last <= peak:  # pct_start 1.0, or a single step: there is no descent
            return top
        return curve((step - peak) / (last - peak), top, final)

    return factor


@register("scheduler", "sgdr")
@register("scheduler", "cosine_restarts")
@checked
def cosine_restarts(
    first_period: Steps,
    multiplier: Steps = 1,
    min_lr_ratio: Ratio = 0.0,
    unit: Unit = "step",
    steps_per_epoch: Steps | None = None,
) -> Schedule:
    """Fall along a half cosine, then restart at 1; each period is `multiplier` times as long as the previous one."""
    first = first_period * _unit_steps("cosine_restarts", unit, steps_per_epoch)

    def factor(step: int) -> float:
        period = first
        if multiplier == 1:
            step %= period
        while step >= period:  # integer arithmetic: a logarithm would miss restarts through rounding
            step, period = step - period, period * multiplier
        return _cosine(step / period, 1.0, min_lr_ratio)

    return factor


@register("scheduler", "inverse_sqrt")
@checked
def inverse_sqrt(warmup_steps: Steps = 2000, total_steps: Steps | None = None) -> Schedule:
    """Rise linearly from 0 over `warmup_steps`, then fall with the inverse square root of the step.

    With `total_steps`, the length of the run, a warm-up that is not shorter is shortened to a tenth.
    """
    if total_steps is not None:
        warmup_steps = max(1, fit_warmup(warmup_steps, total_steps))
    return lambda step: step / warmup_steps if step < warmup_steps else math.sqrt(warmup_steps / step)


def _after_warmup(arguments: Mapping[str, Any], supplied: Mapping[str, Any], place: int) -> Mapping[str, Any]:  # noqa: ARG001
    """Supply the schedule after a warm-up with the remaining steps."""
    values = _with_supplied(arguments, supplied)
    total, scale = values.get("total_steps"), values["scale"]
    if total is None or scale is None:
        return supplied
    return {**supplied, "total_steps": total - _shorter_warmup(values["warmup_steps"] * scale, total)}


@register("scheduler", "warmup", inside=_after_warmup)
@checked
def warmup(
    schedule: Inner,
    warmup_steps: Steps,
    start: Ratio = 0.0,
    unit: Unit = "step",
    steps_per_epoch: Steps | None = None,
    total_steps: Steps | None = None,
) -> Schedule:
    """Rise linearly from `start` to the first value of the schedule over `warmup_steps`, then follow the schedule.

    The schedule counts its steps from the end of the warm-up, as in torch's SequentialLR: `warmup(cosine(70), 30)` ends
    at step 100. With `total_steps`, the length of the run, a warm-up that is not shorter is shortened to a tenth. Of
    `Schedules` the learning rates are warmed up, in every group; other settings wait until then.

    >>> [warmup(step_decay(step_size=2, gamma=0.5), warmup_steps=2)(step) for step in range(6)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.5]
    """
    length = warmup_steps * _unit_steps("warmup", unit, steps_per_epoch)
    if total_steps is not None:
        length = fit_warmup(length, total_steps)
    if isinstance(schedule, Schedules):
        return schedule.changed(lambda one: _warmed_up(one, length, start), lambda one: _delayed(one, length))
    return _warmed_up(schedule, length, start)


def _warmed_up(schedule: Schedule, length: int, start: float) -> Schedule:
    """Rise linearly from `start` to the first value of the schedule, then follow the schedule."""
    top = schedule(0)
    if top == 0 < schedule(1):  # the rate would be 0 until the end of this warm-up
        raise ConfigError("warmup: the schedule inside rises from 0 itself, as in a warm-up; keep one of the two")
    return lambda step: _line(step / length, start, top) if step < length else schedule(step - length)


def _delayed(schedule: Schedule, length: int) -> Schedule:
    """Stay at the first value of the schedule, then follow it."""
    return lambda step: schedule(max(0, step - length))


def _in_sequence(arguments: Mapping[str, Any], supplied: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """Supply a schedule of a sequence with the steps from its milestone to the next one, or to the end of the run."""
    values = _with_supplied(arguments, supplied)
    if values["scale"] is None or place > len(values["milestones"]):  # `sequence` refuses either
        return supplied
    bounds = [0, *(milestone * values["scale"] for milestone in values["milestones"]), supplied.get("total_steps")]
    if bounds[place + 1] is None:
        return supplied
    return {**supplied, "total_steps": max(1, bounds[place + 1] - bounds[place])}


@register("scheduler", "sequence", inside=_in_sequence)
@checked
def sequence(
    schedules: Sequence[Inner],
    milestones: Sequence[Steps],
    unit: Unit = "step",
    steps_per_epoch: Steps | None = None,
) -> Schedule:
    """Follow several schedules in turn: each starts at its milestone and counts its steps from there.

    In an experiment file the `total_steps` of each is the length of its part of the run, unless it has its own.

    >>> chain = sequence([linear(2, start=0.0, end=1.0), cosine(4)], milestones=[2])
    >>> [round(chain(step), 3) for step in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    ends = _ends("sequence", milestones, unit, steps_per_epoch)
    if len(schedules) != len(ends) + 1:
        raise ConfigError(
            f"sequence: {len(schedules)} schedules and {len(ends)} milestones; "
            f"pass one milestone for each schedule after the first"
        )
    _check_single("sequence", schedules)
    starts = [0, *ends]

    def factor(step: int) -> float:
        place = bisect_right(ends, step)
        return schedules[place](step - starts[place])

    return factor


@register("scheduler", "product")
@checked
def product(schedules: Sequence[Inner]) -> Schedule:
    """Multiply schedules: each one scales the others."""
    if not schedules:
        raise ConfigError("product: no schedules; pass at least one")
    _check_single("product", schedules)
    return lambda step: math.prod(schedule(step) for schedule in schedules)


def _check_single(owner: str, schedules: Sequence[Schedule]) -> None:
    """Raise ConfigError for schedules of several groups or settings, of which only the first would be used."""
    if any(isinstance(one, Schedules) for one in schedules):
        raise ConfigError(
            f"{owner}: per_group, by_setting, plateau and one_cycle with cycle_momentum cannot be inside; put the "
            f"{owner} inside them"
        )


def _line(progress: float, start: float, end: float) -> float:
    """Return a point of the line from `start` to `end`, which it keeps after its end."""
    progress = min(progress, 1.0)
    return start * (1.0 - progress) + end * progress


def _cosine(progress: float, start: float, end: float) -> float:
    """Return a point of the half cosine from `start` to `end`, which it keeps after its end."""
    weight = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
    return end + (start - end) * weight


def _warmup_cosine(step: int, warmup_steps: int, total_steps: int, min_lr_ratio: float) -> float:
    """Return the factor at a step: a line from 0 to 1, then a half cosine down to `min_lr_ratio`."""
    if step < warmup_steps:
        return step / warmup_steps
    return _cosine((step - warmup_steps) / (total_steps - warmup_steps), 1.0, min_lr_ratio)


def _with_supplied(arguments: Mapping[str, Any], supplied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a section, completed by supplied values, and the steps per unit."""
    values = {**supplied, **{key: value for key, value in arguments.items() if value is not None}}
    return {**values, "scale": 1 if values["unit"] == "step" else values.get("steps_per_epoch")}


def fit_warmup(warmup_steps: int, total_steps: int) -> int:
    """Return the steps of the warm-up; warn if there are fewer than requested."""
    fitting = _shorter_warmup(warmup_steps, total_steps)
    if fitting != warmup_steps:
        logger.warning(
            "warmup_steps is %d but the run has only %d steps: warming up for %d; set warmup_steps below %d, "
            "or train longer",
            warmup_steps,
            total_steps,
            fitting,
            total_steps,
        )
    return fitting


_fit_warmup_once = functools.lru_cache(maxsize=64)(fit_warmup)


def _shorter_warmup(warmup_steps: int, total_steps: int) -> int:
    """Return the warm-up steps, or a tenth of the run if the warm-up would take all of it."""
    return warmup_steps if warmup_steps < total_steps else total_steps // 10


def _unit_steps(owner: str, unit: Unit, steps_per_epoch: int | None) -> int:
    """Return the number of steps in one unit."""
    if unit == "step":
        return 1
    if steps_per_epoch is None:
        raise ConfigError(f"{owner}: unit is 'epoch' but steps_per_epoch is unknown; set it, or count in steps")
    return steps_per_epoch


def _ends(owner: str, milestones: Sequence[int], unit: Unit, steps_per_epoch: int | None) -> list[int]:
    """Return milestones in steps; raise an error if they are out of order."""
    if any(later <= earlier for earlier, later in pairwise(milestones)):
        raise ConfigError(f"{owner}: milestones are {list(milestones)}; each must be larger than the previous one")
    scale = _unit_steps(owner, unit, steps_per_epoch)
    return [milestone * scale for milestone in milestones]
