"""Schedules against torch's schedulers at every step, and their properties for any settings."""

import math
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.optim import lr_scheduler

from etude.config import build_component, lookup, names
from etude.core import ConfigError
from etude.optim import (
    constant,
    cosine,
    cosine_restarts,
    cosine_schedule_with_warmup,
    exponential,
    inverse_sqrt,
    linear,
    multistep,
    one_cycle,
    polynomial,
    product,
    sequence,
    step_decay,
    warmup,
    warmup_cosine,
)


def torch_factors(make, num_steps: int, steps_per_call: int = 1) -> list[float]:
    """Return the learning rates that a torch scheduler sets for a base rate of 1, one for each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants optimizer.step() before scheduler.step()
        scheduler = make(optimizer)
        rates = []
        for step in range(num_steps):
            rates.append(optimizer.param_groups[0]["lr"])
            if (step + 1) % steps_per_call == 0 and step + 1 < num_steps:
                scheduler.step()
    return rates


def warmed_up(optimizer):
    rise = lr_scheduler.LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=10)
    return lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.CosineAnnealingLR(optimizer, 40)], [10])


@pytest.mark.parametrize(
    ("ours", "theirs", "num_steps"),
    [
        (step_decay(7, 0.3), lambda o: lr_scheduler.StepLR(o, 7, 0.3), 50),
        (multistep([5, 6, 20], 0.5), lambda o: lr_scheduler.MultiStepLR(o, [5, 6, 20], 0.5), 40),
        (exponential(0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9), 60),
        (cosine(40), lambda o: lr_scheduler.CosineAnnealingLR(o, 40), 41),
        (cosine(40, 0.25), lambda o: lr_scheduler.CosineAnnealingLR(o, 40, eta_min=0.25), 41),
        (linear(30, end=0.2), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=30), 50),
        (polynomial(30, power=2.5), lambda o: lr_scheduler.PolynomialLR(o, 30, power=2.5), 50),
        (one_cycle(100), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 100), 100),
        (one_cycle(37, 0.55, 10.0, 100.0), lambda o: lr_scheduler.OneCycleLR(
            o, 1.0, 37, pct_start=0.55, div_factor=10.0, final_div_factor=100.0), 37),
        (one_cycle(50, anneal="linear"), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 50, anneal_strategy="linear"), 50),
        (cosine_restarts(8), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8), 50),
        (cosine_restarts(5, 3, 0.1), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 3, eta_min=0.1), 300),
        (sequence([linear(10, start=0.1, end=1.0), cosine(40)], [10]), warmed_up, 50),
        (warmup(cosine(40), 10, start=0.1), warmed_up, 50),
        (warmup(step_decay(7, 0.3), 10, start=0.1), lambda o: lr_scheduler.SequentialLR(o, [
            lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=10), lr_scheduler.StepLR(o, 7, 0.3)], [10]), 50),
        (warmup(constant(), 10, start=0.1), lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=10), 20),
        (constant(0.5), lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=10**9), 20),
        (product([step_decay(7, 0.3), exponential(0.9)]), lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.StepLR(o, 7, 0.3), lr_scheduler.ExponentialLR(o, 0.9)]), 30),
    ],
)  # fmt: skip
def test_every_step_equals_torch(ours, theirs, num_steps):
    expected = torch_factors(theirs, num_steps)
    assert [ours(step) for step in range(num_steps)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (step_decay(3, 0.3, unit="epoch", steps_per_epoch=4), lambda o: lr_scheduler.StepLR(o, 3, 0.3)),
        (multistep([2, 5], 0.5, unit="epoch", steps_per_epoch=4), lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5)),
        (exponential(0.9, unit="epoch", steps_per_epoch=4), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    ],
)
def test_epochs_as_unit_equal_a_torch_scheduler_stepped_once_an_epoch(ours, theirs):
    expected = torch_factors(theirs, 40, steps_per_call=4)
    assert [ours(step) for step in range(40)] == pytest.approx(expected, rel=1e-12)


def test_lengths_in_epochs_are_lengths_in_steps_times_the_epoch():
    for step in range(60):
        assert cosine_restarts(2, 2, unit="epoch", steps_per_epoch=7)(step) == cosine_restarts(14, 2)(step)
        in_epochs = warmup(constant(), 2, unit="epoch", steps_per_epoch=7)
        assert in_epochs(step) == warmup(constant(), 14)(step)
        chain = sequence([constant(), constant(0.5)], [3], unit="epoch", steps_per_epoch=7)
        assert chain(step) == (1.0 if step < 21 else 0.5)


def test_inverse_sqrt_is_the_formula():
    schedule = inverse_sqrt(100)
    assert [schedule(step) for step in (0, 25, 50, 100)] == [0.0, 0.25, 0.5, 1.0]
    assert schedule(400) == 0.5
    assert schedule(10_000) == 0.1


@settings(deadline=None)
@given(
    warmup_steps=st.integers(0, 200),
    decay_steps=st.integers(1, 1000),
    step=st.integers(0, 2000),
    ratio=st.floats(0, 1),
    base_lr=st.floats(1e-6, 10),
)
def test_cosine_with_warmup_is_the_documented_formula(warmup_steps, decay_steps, step, ratio, base_lr):
    total_steps = warmup_steps + decay_steps
    if step < warmup_steps:
        expected = base_lr * step / warmup_steps
    else:
        angle = math.pi * min((step - warmup_steps) / decay_steps, 1.0)
        expected = base_lr * (ratio + (1 - ratio) * (1 + math.cos(angle)) / 2)
    rate = cosine_schedule_with_warmup(step, base_lr, warmup_steps, total_steps, ratio)
    assert rate == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert rate == base_lr * warmup_cosine(total_steps, warmup_steps, ratio)(step)


steps = st.integers(1, 300)
ratios = st.floats(0, 1)
gammas = st.floats(0.01, 1)
increasing = st.lists(steps, min_size=1, max_size=4, unique=True).map(sorted)
falling = st.one_of(
    st.builds(constant, ratios),
    st.builds(step_decay, steps, gammas),
    st.builds(multistep, increasing, gammas),
    st.builds(exponential, gammas),
    st.builds(cosine, steps, ratios),
    st.builds(linear, steps, ratios),
    st.builds(polynomial, steps, st.floats(0.2, 5), ratios),
)
smooth = st.one_of(
    st.builds(cosine, steps, ratios),
    st.builds(linear, steps, ratios, ratios),
    st.builds(polynomial, steps, st.floats(1, 5), ratios),
    st.builds(inverse_sqrt, steps),
    st.builds(lambda total, warm, ratio: warmup_cosine(total + warm, warm, ratio), steps, steps, ratios),
)
rising_and_falling = st.one_of(
    st.builds(one_cycle, steps, ratios, st.floats(1, 100), st.floats(1, 1e5), st.sampled_from(["cos", "linear"])),
    st.builds(cosine_restarts, steps, st.integers(1, 3), ratios),
)
single = st.one_of(falling, smooth, rising_and_falling)
without_warmup = single.filter(lambda schedule: not schedule(0) == 0 < schedule(1))
composed = st.one_of(
    single,
    st.builds(warmup, without_warmup, steps, ratios),
    st.builds(product, st.lists(single, min_size=1, max_size=3)),
    st.builds(lambda a, b, end: sequence([a, b], [end]), single, single, steps),
)


@settings(deadline=None)
@given(schedule=composed, step=st.one_of(st.integers(0, 1000), st.integers(0, 10**9)))
def test_a_factor_is_finite_between_zero_and_one_and_the_same_when_asked_again(schedule, step):
    factor = schedule(step)
    assert 0.0 <= factor <= 1.0 + 1e-12
    schedule(step + 17)
    assert schedule(step) == factor


@settings(deadline=None)
@given(schedule=falling)
def test_decays_never_rise(schedule):
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(map(schedule, range(0, 700, 3))))


@settings(deadline=None)
@given(schedule=without_warmup, length=steps, start=ratios)
def test_a_warmup_rises_in_a_straight_line_to_the_beginning_of_its_schedule(schedule, length, start):
    warmed = warmup(schedule, length, start)
    assert warmed(0) == start
    differences = [b - a for a, b in pairwise(warmed(step) for step in range(length + 1))]
    assert differences == pytest.approx([(schedule(0) - start) / length] * length, abs=1e-12)
    assert all(warmed(length + step) == schedule(step) for step in range(50))


@settings(deadline=None)
@given(
    total=st.integers(2, 400),
    share=st.floats(0.01, 0.99),
    ratio=ratios,
    name=st.sampled_from(["cosine", "linear", "polynomial"]),
    nested=st.booleans(),
)
def test_a_warmup_in_a_config_peaks_at_one_and_its_decay_ends_with_the_run(total, share, ratio, name, nested):
    length = min(max(1, round(share * total)), total - 1)
    decay = {"name": name, ("min_lr_ratio" if name == "cosine" else "end"): ratio}
    section = {"name": "warmup", "warmup_steps": length, "schedule": decay}
    if nested:
        section = {"name": "product", "schedules": [section, "constant"]}
    schedule = build_component("scheduler", section, provided={"total_steps": total, "steps_per_epoch": 7})
    assert schedule(length) == pytest.approx(1.0)
    assert max(schedule(step) for step in range(total + 1)) == pytest.approx(1.0)
    assert schedule(total) == pytest.approx(ratio, abs=1e-12)
    if name == "cosine":
        same = warmup_cosine(total, length, ratio)
        assert [schedule(step) for step in range(total)] == pytest.approx([same(step) for step in range(total)])


@settings(deadline=None)
@given(length=st.integers(1, 20), per_epoch=st.integers(1, 9), epochs=st.integers(1, 12), by_epoch=st.booleans())
def test_a_warmup_longer_than_the_run_is_shortened_and_the_decay_still_ends_with_it(
    length, per_epoch, epochs, by_epoch
):
    total, asked = per_epoch * epochs, length * (per_epoch if by_epoch else 1)
    section = {
        "name": "warmup",
        "warmup_steps": length,
        "unit": "epoch" if by_epoch else "step",
        "schedule": "cosine",
    }
    supplied = {"total_steps": total, "steps_per_epoch": per_epoch}
    schedule = build_component("scheduler", section, provided=supplied)
    fitting = asked if asked < total else total // 10
    same = warmup_cosine(total, asked, 0.0)
    for other in (schedule, same):
        assert other(fitting) == pytest.approx(1.0)
        assert other(total) == pytest.approx(0.0, abs=1e-12)


def test_schedules_of_a_sequence_get_the_length_of_their_part_of_the_run():
    section = {
        "name": "sequence",
        "schedules": [{"name": "linear", "start": 0.0, "end": 1.0}, "constant", "cosine"],
        "milestones": [2, 3],
        "unit": "epoch",
    }
    schedule = build_component("scheduler", section, provided={"total_steps": 50, "steps_per_epoch": 10})
    assert [schedule(step) for step in (0, 10, 20, 29, 30, 40, 50)] == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0])
    own = {**section, "schedules": [*section["schedules"][:2], {"name": "cosine", "total_steps": 10}]}
    schedule = build_component("scheduler", own, provided={"total_steps": 50, "steps_per_epoch": 10})
    assert [schedule(step) for step in (30, 35, 40, 50)] == pytest.approx([1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("make", "warmed"),
    [
        (lambda: warmup_cosine(100), 10),
        (lambda: warmup_cosine(100, 100), 10),
        (lambda: warmup(cosine(99), 120, total_steps=99), 9),
        (lambda: lambda step: cosine_schedule_with_warmup(step, 1.0, 207, 107), 10),
    ],
)
def test_a_warmup_longer_than_the_run_is_one_warning(make, warmed, caplog):
    schedule = make()
    assert [schedule(step) for step in (0, warmed)] == [0.0, 1.0]
    assert 0 < schedule(warmed - 1) < 1
    assert caplog.text.count("warmup_steps is") == 1
    assert f"warming up for {warmed}" in caplog.text


@settings(deadline=None)
@given(warmup_steps=steps, decay_steps=steps, ratio=ratios)
def test_warmup_cosine_is_continuous_peaks_at_one_and_stays_at_its_minimum(warmup_steps, decay_steps, ratio):
    schedule = warmup_cosine(warmup_steps + decay_steps, warmup_steps, ratio)
    assert schedule(0) == 0.0
    assert schedule(warmup_steps) == 1.0
    rise = [schedule(step) for step in range(warmup_steps + 1)]
    fall = [schedule(step) for step in range(warmup_steps, warmup_steps + decay_steps + 1)]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert schedule(warmup_steps - 1) == pytest.approx(1.0 - 1.0 / warmup_steps)
    assert fall[-1] == schedule(10**9) == pytest.approx(ratio, abs=1e-15)


@settings(deadline=None)
@given(first=st.integers(2, 50), multiplier=st.integers(1, 4), cycles=st.integers(1, 8))
def test_restarts_come_exactly_at_the_end_of_each_period(first, multiplier, cycles):
    schedule = cosine_restarts(first, multiplier)
    start = sum(first * multiplier**cycle for cycle in range(cycles))
    assert schedule(start) == 1.0
    assert schedule(start - 1) < 1.0
    half = first * multiplier**cycles
    if half % 2 == 0:
        assert schedule(start + half // 2) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", [cosine(10, 0.2), linear(10, 0.2), polynomial(10, 2.0, 0.2), one_cycle(10)])
def test_after_the_last_step_a_schedule_stays_where_it_ended(schedule):
    assert schedule(11) == schedule(10) == schedule(10**12)


@pytest.mark.parametrize(("total", "pct"), [(1, 0.3), (1, 1.0), (2, 0.5), (4, 0.25), (10, 0.0), (10, 1.0)])
def test_one_cycle_has_no_gap_at_its_edges(total, pct):
    schedule = one_cycle(total, pct)
    factors = [schedule(step) for step in range(total + 3)]
    assert all(0 < factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cosine_schedule_with_warmup(0, 1.0, -1, 10), "warmup_steps is -1"),
        (lambda: cosine_schedule_with_warmup(0, 1.0, 0, 0), "total_steps is 0"),
        (lambda: cosine_schedule_with_warmup(-1, 1.0, 0, 9), "step is -1"),
        (lambda: cosine_schedule_with_warmup(0, -1.0, 0, 9), "base_lr is -1.0"),
        (lambda: cosine_schedule_with_warmup(0, 1.0, 0, 9, math.nan), "min_lr_ratio is nan"),
        (lambda: warmup_cosine(0), "warmup_cosine: total_steps is 0; it must be at least 1"),
        (lambda: cosine(10, min_lr_ratio=1.5), "cosine: min_lr_ratio is 1.5; it must be at least 0 and at most 1"),
        (lambda: step_decay(0), "step_decay: step_size is 0; it must be at least 1"),
        (lambda: exponential(0.0), "exponential: gamma is 0.0; it must be above 0 and at most 1"),
        (lambda: step_decay(3, unit="epoch"), "step_decay: unit is 'epoch' but steps_per_epoch is unknown"),
        (lambda: multistep([30, 60, 8]), r"multistep: milestones are \[30, 60, 8\]; each must be larger"),
        (lambda: multistep([5, 0]), r"multistep: milestones\[1\] is 0; it must be at least 1"),
        (lambda: sequence([constant()], [5]), "sequence: 1 schedules and 1 milestones; pass one milestone for each"),
        (lambda: product([]), "product: no schedules"),
        (lambda: warmup(warmup_cosine(10, 2), 3), "warmup: the schedule inside rises from 0 itself"),
        (lambda: warmup(warmup(cosine(10), 2), 3), "warmup: the schedule inside rises from 0 itself"),
        (lambda: cosine_restarts(5, 0), "cosine_restarts: multiplier is 0; it must be at least 1"),
        (lambda: one_cycle(10, pct_start=30), "one_cycle: pct_start is 30"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_one_clear_line(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_registered_under_the_names_people_write():
    expected = {
        "constant": constant,
        "warmup_cosine": warmup_cosine,
        "step": step_decay,
        "step_decay": step_decay,
        "multistep": multistep,
        "exponential": exponential,
        "cosine": cosine,
        "cosine_annealing": cosine,
        "linear": linear,
        "polynomial": polynomial,
        "one_cycle": one_cycle,
        "sgdr": cosine_restarts,
        "cosine_restarts": cosine_restarts,
        "inverse_sqrt": inverse_sqrt,
        "warmup": warmup,
        "sequence": sequence,
        "product": product,
    }
    assert set(expected) <= set(names("scheduler"))
    assert all(lookup("scheduler", name).factory is function for name, function in expected.items())
