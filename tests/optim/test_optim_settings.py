"""Schedules of parameter groups and of other settings, as they are applied to an optimizer."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from etude.callbacks.reduce_on_plateau import plateau
from etude.core import ConfigError, TrainingError
from etude.engine.learning_rate import LearningRate
from etude.optim import (
    SAM,
    SGD,
    AdamW,
    RMSprop,
    Schedules,
    by_setting,
    constant,
    cosine,
    linear,
    one_cycle,
    per_group,
    product,
    sequence,
    warmup,
    wsd,
)


def model():
    return nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "head": nn.Linear(3, 2)})


def adamw(**more):
    groups = [{"params": "backbone", "lr": 0.5}, {"params": "head.bias", "name": "bias"}]
    return AdamW(model(), lr=0.1, weight_decay=0.2, groups=groups, **more)


def rates(optimizer):
    return {group.get("name"): group["lr"] for group in optimizer.param_groups}


def test_every_group_follows_its_own_schedule():
    optimizer = adamw()
    rate = LearningRate(optimizer, per_group({"backbone": linear(10), "bias": wsd(10)}, default=cosine(10)))
    for step in range(12):
        assert not rate.set(step)
        wanted = {None: 0.1 * cosine(10)(step), "backbone": 0.5 * linear(10)(step), "bias": 0.1 * wsd(10)(step)}
        assert rates(optimizer) == pytest.approx(wanted)


def test_without_a_default_the_others_are_constant_and_layers_belong_to_their_group():
    optimizer = adamw(layer_decay=0.5)
    before = {name: lr for name, lr in rates(optimizer).items() if name is not None}
    assert any(name.startswith("backbone/") for name in before)
    LearningRate(optimizer, per_group({"backbone": constant(0.25)})).set(3)
    for name, lr in rates(optimizer).items():
        if name is not None:
            assert lr == pytest.approx(before[name] * (0.25 if name.startswith("backbone") else 1.0))


def test_a_warmup_of_several_schedules_warms_up_every_rate_and_other_settings_wait():
    inner = by_setting(per_group({"backbone": linear(10)}, default=cosine(10)), weight_decay=linear(10))
    warmed = Schedules.of(warmup(inner, 5))
    for step in range(15):
        assert warmed(step) == warmup(cosine(10), 5)(step)
        assert warmed.of_group("backbone")(step) == warmup(linear(10), 5)(step)
        assert warmed.factors["weight_decay"](step) == linear(10)(max(0, step - 5))


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize(("make", "read"), [
    (lambda params: SGD(params, lr=1.0, momentum=0.9), lambda group: group["momentum"]),
    (lambda params: AdamW(params, lr=1.0), lambda group: group["betas"][0]),
])  # fmt: skip
def test_the_momentum_of_one_cycle_is_that_of_torch(make, read, anneal):
    def settings_of(optimizer):
        return [(group["lr"], read(group), group.get("betas", (0, 0))[1]) for group in optimizer.param_groups]

    reference, ours = (make([torch.zeros(1, requires_grad=True)]) for _ in range(2))
    options = {"base_momentum": 0.8, "max_momentum": 0.97}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants optimizer.step() before scheduler.step()
        scheduler = lr_scheduler.OneCycleLR(reference, 1.0, 40, anneal_strategy=anneal, **options)
        rate = LearningRate(ours, one_cycle(40, anneal=anneal, cycle_momentum=True, **options))
        for step in range(40):
            rate.set(step)
            assert settings_of(ours) == [pytest.approx(one) for one in settings_of(reference)]
            assert rate.others() == {"momentum": pytest.approx(read(reference.param_groups[0]))}
            if step < 39:
                scheduler.step()


def test_settings_are_their_base_value_times_the_factor_also_after_loading():
    def make():
        one = AdamW(model(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, decay_only_matrices=True)
        schedules = by_setting(cosine(10), beta1=linear(10), beta2=wsd(10), weight_decay=linear(10, start=0.5, end=1))
        return one, LearningRate(one, schedules)

    optimizer, rate = make()
    for step in range(10):
        if step == 6:  # as a resumed run does, from values that the schedule has changed
            saved = optimizer.state_dict()
            optimizer, rate = make()
            optimizer.load_state_dict(saved)
        rate.set(step)
        matrices, vectors = optimizer.param_groups
        assert matrices["weight_decay"] == 0.2 * linear(10, start=0.5, end=1)(step)
        assert vectors["weight_decay"] == 0.0
        for group in optimizer.param_groups:
            assert group["betas"] == (0.8 * linear(10)(step), 0.9 * wsd(10)(step))
        assert rate.others() == {"beta1": matrices["betas"][0], "beta2": matrices["betas"][1],
                                 "weight_decay": matrices["weight_decay"]}  # fmt: skip


def test_only_settings_that_differ_from_the_last_step_have_changed():
    optimizer = adamw()
    rate = LearningRate(optimizer, by_setting(cosine(9), weight_decay=sequence([constant(), linear(4)], [3])))
    assert [list(rate.set(step)) for step in range(6)] == [[], [], [], [], ["weight_decay"], ["weight_decay"]]


@pytest.mark.parametrize(
    ("make", "schedule", "words"),
    [
        (adamw, lambda: per_group({"bakbone": cosine(9)}), "'bakbone'.*did you mean 'backbone'"),
        (lambda: SGD(model(), lr=1), lambda: per_group({"head": cosine(9)}), "name groups under optimizer.groups"),
        (adamw, lambda: per_group({}), "no groups"),
        (adamw, lambda: per_group({"bias": by_setting(weight_decay=cosine(9))}), "group 'bias' must be a single one"),
        (adamw, lambda: per_group({"bias": cosine(9)}, default=per_group({"head": cosine(9)})), "must be a single"),
        (lambda: SGD(model(), lr=1), lambda: by_setting(beta1=cosine(9)), "beta1, which SGD does not have"),
        (lambda: SAM(SGD(model(), lr=1)), lambda: by_setting(beta1=cosine(9)), "beta1, which SGD does not have"),
        (lambda: SGD(model(), lr=1), lambda: by_setting(momentum=cosine(9)), "momentum, which is 0; set optimizer"),
        (lambda: RMSprop(model()), lambda: by_setting(weight_decay=cosine(9)), "weight_decay, which is 0"),
        (adamw, lambda: one_cycle(9, base_momentum=0.8), "base_momentum and max_momentum need cycle_momentum"),
        (adamw, lambda: one_cycle(9, anneal="cosine"), "anneal is 'cosine'; it must be .*cos"),
        (adamw, lambda: by_setting(lr=cosine(9)), "no setting has a schedule"),
        (adamw, lambda: by_setting(momentum=cosine(9), beta1=cosine(9)), "keep one of them"),
        (adamw, lambda: by_setting(one_cycle(9, cycle_momentum=True), momentum=cosine(9)), "already sets momentum"),
        (adamw, lambda: by_setting(one_cycle(9, cycle_momentum=True), beta1=cosine(9)), "already sets beta1"),
        (adamw, lambda: plateau(by_setting(plateau(), weight_decay=cosine(9))), "plateau is inside plateau"),
        (adamw, lambda: by_setting(weight_decay=one_cycle(9, cycle_momentum=True)), "must be a single one"),
        (adamw, lambda: product([cosine(9), by_setting(weight_decay=cosine(9))]), "put the product inside"),
        (adamw, lambda: sequence([per_group({"bias": cosine(9)}), cosine(9)], [3]), "put the sequence inside"),
    ],
)
def test_mistakes_are_one_line(make, schedule, words):
    with pytest.raises(ConfigError, match=words) as caught:
        LearningRate(make(), schedule())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("factor", [float("nan"), -1.0, float("inf"), None])
def test_a_factor_that_is_no_factor_is_an_error_of_its_step(factor):
    rate = LearningRate(adamw(), by_setting(weight_decay=lambda step: factor if step == 2 else 1.0))
    rate.set(1)
    with pytest.raises(TrainingError, match="step 2"):
        rate.set(2)


def test_a_momentum_of_one_is_refused():
    with pytest.raises(TrainingError, match=r"beta1 1\.8 for step 0; it must be below 1"):
        LearningRate(adamw(), by_setting(beta1=lambda step: 2.0)).set(0)


@pytest.mark.parametrize("kernel", ["loop", "foreach"])
def test_a_momentum_may_rise_from_0(kernel):
    """As if there had been a buffer of zeros from the start."""

    def train(one):
        rate = LearningRate(one, by_setting(momentum=linear(4, start=0.0, end=1.0)))
        (param,) = one.param_groups[0]["params"]
        for step in range(4):
            rate.set(step)
            param.grad = torch.full_like(param, step + 1.0)
            one.step()
        return param

    ours = train(RMSprop([torch.ones(3, requires_grad=True)], lr=0.1, momentum=0.8, kernel=kernel))
    weight, square, buffer = 1.0, 0.0, 0.0
    for step in range(4):
        square = 0.99 * square + 0.01 * (step + 1) ** 2
        update = (step + 1) / (square**0.5 + 1e-8)
        buffer = 0.8 * step / 4 * buffer + update if step else 0.0
        weight -= 0.1 * (buffer if step else update)
    torch.testing.assert_close(ours, torch.full((3,), weight))


def test_the_schedule_of_a_group_whose_parameters_are_all_frozen_is_refused_with_the_reason():
    frozen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    frozen[0].requires_grad_(False)
    optimizer = SGD(frozen, lr=1, groups=[{"params": "0", "name": "backbone", "lr": 0.1}])
    with pytest.raises(ConfigError, match=r"'backbone', which the optimizer does not have.*all frozen is left out"):
        LearningRate(optimizer, per_group({"backbone": cosine(9)}))
