"""Warm-up, plateau and cooldown against Hugging Face's schedule and the formulas, and for any settings."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from etude.config import build_component
from etude.core import ConfigError
from etude.optim import constant, cooldown, cosine, sequence, wsd

SHAPES = ("linear", "sqrt", "cosine", "power")


@pytest.mark.parametrize(("shape", "theirs"), [("linear", "linear"), ("sqrt", "1-sqrt"), ("cosine", "cosine")])
@pytest.mark.parametrize(("rise", "stay", "fall", "ratio"), [(10, 50, 40, 0.0), (7, 0, 13, 0.25), (0, 5, 1, 0.1)])
def test_the_schedule_of_hugging_face(shape, theirs, rise, stay, fall, ratio):
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    lengths = {"num_warmup_steps": rise, "num_stable_steps": stay, "num_decay_steps": fall}
    reference = optimization.get_wsd_schedule(optimizer, **lengths, decay_type=theirs, min_lr_ratio=ratio)
    total = rise + stay + fall
    ours = wsd(total, warmup_steps=rise, cooldown_steps=fall, shape=shape, min_lr_ratio=ratio)
    for step in range(total + 5):
        if step >= rise:  # theirs rises from the ratio
            assert ours(step) == pytest.approx(reference.lr_lambdas[0](step), abs=1e-12)
        else:
            assert ours(step) == step / rise


@settings(deadline=None)
@given(
    total=st.integers(1, 500),
    shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    shape=st.sampled_from(SHAPES),
    ratio=st.floats(0, 1),
)
def test_three_monotone_parts_without_a_jump(total, shares, shape, ratio):
    rise, fall = math.floor(shares[0] * total), math.floor(shares[1] * total)
    in_steps = wsd(total, warmup_steps=rise, cooldown_steps=fall, shape=shape, min_lr_ratio=ratio)
    factors = [in_steps(step) for step in range(total + 3)]
    assert all(0 <= one <= 1 for one in factors)
    assert factors[: rise + 1] == pytest.approx([step / rise for step in range(rise + 1)] if rise else [1.0])
    assert set(factors[rise : total - fall + 1]) == {1.0}
    assert all(later <= earlier + 1e-15 for earlier, later in pairwise(factors[rise:]))
    assert factors[total:] == pytest.approx([ratio if fall else 1.0] * 3)
    alone = cooldown(max(fall, 1), shape, ratio)
    if fall:
        assert factors[total - fall :] == [alone(step) for step in range(fall + 3)]


@pytest.mark.parametrize(("rise", "fall"), [(0.5, 0.5), (0.1, 0.9), (0.8, None)])
def test_fractions_of_the_whole_run_fit_into_a_run_of_any_length(rise, fall):
    for total in range(1, 60):
        made = wsd(total, warmup_fraction=rise, cooldown_fraction=fall)
        assert made(round(rise * total)) == 1.0 or total == 1
    with pytest.raises(ConfigError, match=r"warmup_fraction 0\.6 and cooldown_fraction 0\.5 are more than the whole"):
        wsd(100, warmup_fraction=0.6, cooldown_fraction=0.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_shapes_are_their_formulas(shape, ratio):
    formulas = {
        "linear": lambda x: 1 - x,
        "sqrt": lambda x: 1 - x**0.5,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "power": lambda x: (1 - x) ** 3,
    }
    ours = cooldown(20, shape, ratio, power=3.0 if shape == "power" else None)
    wanted = [ratio + (1 - ratio) * formulas[shape](min(step / 20, 1)) for step in range(25)]
    assert [ours(step) for step in range(25)] == pytest.approx(wanted, abs=1e-12)


def test_fractions_are_of_the_run_and_a_cooldown_can_follow_anything():
    by_share = wsd(200, warmup_fraction=0.1, cooldown_fraction=0.25, shape="linear")
    by_steps = wsd(200, warmup_steps=20, cooldown_steps=50, shape="linear")
    assert [by_share(step) for step in range(210)] == [by_steps(step) for step in range(210)]
    assert [wsd(100)(step) for step in (0, 80, 100)] == [1.0, 1.0, 0.0]
    section = {"name": "sequence", "schedules": ["constant", "cooldown"], "milestones": [30]}
    chain = build_component("scheduler", section, provided={"total_steps": 50, "steps_per_epoch": 5})
    same = sequence([constant(), cooldown(20)], [30])
    assert [chain(step) for step in range(60)] == [same(step) for step in range(60)]
    assert chain(50) == 0.0


def test_a_warmup_longer_than_the_run_is_shortened_with_one_warning(caplog):
    schedule = wsd(100, warmup_steps=100, cooldown_steps=20)
    assert [schedule(step) for step in (5, 10, 80)] == [0.5, 1.0, 1.0]
    assert caplog.text.count("warmup_steps is 100") == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wsd(100, cooldown_fraction=1.5), "cooldown_fraction is 1.5"),
        (lambda: wsd(100, warmup_steps=-1), "warmup_steps is -1"),
        (lambda: wsd(100, cooldown_steps=-5), "cooldown_steps is -5"),
        (lambda: wsd(100, warmup_steps=60, cooldown_steps=60), "60 steps and the cooldown of 60 are longer"),
        (lambda: wsd(100, cooldown_steps=10, cooldown_fraction=0.1), "cooldown_steps and cooldown_fraction"),
        (lambda: wsd(100, warmup_steps=10, warmup_fraction=0.1), "warmup_steps and warmup_fraction"),
        (lambda: wsd(100, min_lr_ratio=float("nan")), "min_lr_ratio is nan"),
        (lambda: cooldown(10, "sqr"), "shape is 'sqr'; it must be .*sqrt"),
        (lambda: cooldown(10, "cosine", power=2.0), "power is 2.0, but shape is 'cosine'"),
        (lambda: cosine(10, start=1.5), "start is 1.5"),
    ],
)
def test_mistakes_are_one_line(make, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
