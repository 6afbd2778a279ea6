"""The learning rate of a step: base times schedule times scale, and untouched where there is neither."""

import numpy as np
import pytest
import torch
from captured_steps import assert_same, batches, make, weights

from etude.core import TrainingError
from etude.engine.capture import WARM_UP_STEPS
from etude.engine.learning_rate import LearningRate
from etude.optim import by_setting, linear, set_lr


def optimizer(tensor=False):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.3)]
    if tensor:
        groups = [group | {"lr": torch.tensor(group["lr"])} for group in groups]
    return torch.optim.AdamW(groups, capturable=False, foreach=False)


def rates(one):
    return [float(group["lr"]) for group in one.param_groups]


def test_without_schedule_and_scale_rates_are_left_alone():
    one = optimizer()
    rate = LearningRate(one, None)
    one.param_groups[0]["lr"] = 0.7  # somebody else's doing
    kept = [group["lr"] for group in one.param_groups]
    rate.set(3)
    assert [group["lr"] for group in one.param_groups] == kept


@pytest.mark.parametrize("schedule", [None, lambda step: 1 / (step + 1)])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_scale_is_a_factor_of_every_rate_and_1_gives_the_base_back(schedule, tensor):
    one = optimizer(tensor)
    rate = LearningRate(one, schedule)
    for step, scale in enumerate([1.0, 0.5, 0.0, 2.0, 1.0]):
        rate.scales["phase"] = scale
        rate.set(step)
        factor = scale * (1.0 if schedule is None else schedule(step))
        assert rates(one) == pytest.approx([0.1 * factor, 0.3 * factor])


def test_a_scale_of_1_changes_no_bit_of_a_scheduled_rate():
    plain, scaled = optimizer(), optimizer()
    one, other = LearningRate(plain, lambda step: 0.9**step), LearningRate(scaled, lambda step: 0.9**step)
    other.scales["phase"] = 1.0
    for step in range(20):
        one.set(step)
        other.set(step)
        assert rates(plain) == rates(scaled)


@pytest.mark.parametrize("tensor", [False, True])
def test_the_base_rate_outlives_the_object_and_the_process(tensor):
    """A new object goes on from the base rate, with the same optimizer or with one loaded from its state."""
    one = optimizer(tensor)
    for step in range(4):
        LearningRate(one, lambda step: 0.5**step).set(step)
        assert rates(one) == pytest.approx([0.1 * 0.5**step, 0.3 * 0.5**step])
    other = optimizer(tensor)
    other.load_state_dict(one.state_dict())
    LearningRate(other, lambda step: 0.5**step).set(4)
    assert rates(other) == pytest.approx([0.1 / 16, 0.3 / 16])


@pytest.mark.parametrize("tensor", [False, True])
def test_the_base_rate_is_that_of_torchs_schedulers(tensor):
    one = optimizer(tensor)
    torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.25)
    assert rates(one) == pytest.approx([0.1 / 4, 0.3 / 4])
    LearningRate(one, lambda step: 0.5).set(0)
    assert rates(one) == pytest.approx([0.1 / 2, 0.3 / 2])


def test_a_group_that_is_added_later_follows_from_its_own_rate():
    one = optimizer()
    rate = LearningRate(one, lambda step: 1 / (step + 1))
    rate.set(3)
    one.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 0.8})
    for step in (1, 3, 0):
        rate.set(step)
        assert rates(one) == pytest.approx([0.1 / (step + 1), 0.3 / (step + 1), 0.8 / (step + 1)])


def test_a_rate_set_by_the_user_is_the_new_base():
    one = optimizer()
    LearningRate(one, lambda step: 0.5).set(0)
    set_lr(one, 0.6)
    LearningRate(one, lambda step: 0.5).set(1)
    assert rates(one) == pytest.approx([0.3, 0.3])


def test_a_rate_set_before_the_first_step_is_the_base_too():
    one = optimizer()
    rate = LearningRate(one, lambda step: 0.5)
    set_lr(one, 0.6)
    rate.set(0)
    assert rates(one) == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64])
def test_a_factor_of_numpy_makes_a_plain_rate(number):
    one = optimizer()
    LearningRate(one, lambda step: number(1)).set(0)
    assert [type(group["lr"]) for group in one.param_groups] == [float, float]


def test_rates_of_a_loaded_optimizer_follow_the_base_it_was_made_with():
    one = optimizer()
    rate = LearningRate(one, None)
    for group in one.param_groups:
        group["lr"] *= 0.5  # as a checkpoint of a phase with another scale has them
    rate.scales["phase"] = 1.0
    rate.set(0)
    assert rates(one) == pytest.approx([0.1, 0.3])


def test_steps_in_which_a_setting_changes_run_eagerly_and_the_others_are_captured():
    """Weight decay rises for six steps and then stays: the bytes are those of a run without capture."""
    settings = by_setting(weight_decay=linear(6, start=0.1, end=1.0))

    def run(capture, needed=False):
        step, recorded, notices = make(needed=needed)
        if not capture:
            step.capture = None
        rate = LearningRate(step.updater.optimizer, settings)
        for number, batch in enumerate(batches(20)):
            step.changed_settings = rate.set(number)
            step([batch])
        return step, recorded, notices

    step, recorded, notices = run(capture=True)
    words = "steps in which a schedule changes weight_decay are not captured as CUDA graphs"
    assert notices.count(words) == 1
    assert recorded.recorder.recorded == 1
    assert recorded.recorder.replayed == 20 - 7 - WARM_UP_STEPS
    assert_same(weights(step), weights(run(capture=False)[0]))
    with pytest.raises(TrainingError, match="a schedule changes weight_decay between steps"):
        run(capture=True, needed=True)
