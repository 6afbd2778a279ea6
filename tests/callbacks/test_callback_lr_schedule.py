"""LRSchedule against the same torch scheduler driven by hand."""

import json

import pytest
import torch
from callback_life import Life, report
from torch.optim import lr_scheduler

from etude.callbacks import LRSchedule
from etude.core import ConfigError, TrainingError

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 11]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.MultiStepLR(o, [2, 4])], milestones=[4]
    ),
}


def optimizer() -> torch.optim.Optimizer:
    groups = [
        {"params": [torch.zeros(1, requires_grad=True)]},
        {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.3},
    ]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def rates(one: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in one.param_groups]


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("resume_at", [0, 3, 7])
def test_same_rates_as_the_scheduler_alone_also_after_a_resume(make, interval, resume_at):
    reference = optimizer()
    scheduler = make(reference)
    wanted = []
    for _ in range(14):
        reference.step()
        scheduler.step()
        wanted.append(rates(reference))

    driven = optimizer()
    callback = LRSchedule(make(driven), interval)
    found = []
    for count in range(14):
        if count == resume_at:
            state = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
            groups = driven.state_dict()
            driven = optimizer()
            callback = LRSchedule(make(driven), interval)
            driven.load_state_dict(groups)
            callback.load_state_dict(state)
        driven.step()
        callback.on_step_end(report()) if interval == "step" else callback.on_epoch_end(count, {})
        found.append(rates(driven))
    assert found == wanted


@pytest.mark.parametrize("resume_at", [None, 2, 5])
def test_plateau_follows_the_monitored_number(resume_at):
    losses = [1.0, 0.9, 0.95, 0.96, 0.5, 0.6, 0.7, 0.8]
    reference = optimizer()
    scheduler = lr_scheduler.ReduceLROnPlateau(reference, patience=0, cooldown=1)
    driven = optimizer()
    callback = LRSchedule(lr_scheduler.ReduceLROnPlateau(driven, patience=0, cooldown=1), monitor="val_loss")
    for epoch, loss in enumerate(losses):
        if epoch == resume_at:
            state = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
            driven = optimizer()
            callback = LRSchedule(lr_scheduler.ReduceLROnPlateau(driven, patience=0, cooldown=1), monitor="val_loss")
            callback.load_state_dict(state)
        scheduler.step(loss)
        callback.on_epoch_end(epoch, {"loss": 9.0, "val_loss": loss})
        callback.on_epoch_end(epoch, {"loss": 9.0})  # an epoch without validation does not count
        assert rates(driven) == rates(reference)
    assert rates(driven)[0] < 0.01


def test_plateau_of_another_metric_begins_again(tmp_path):
    life, callbacks = Life(tmp_path), []
    for name, mode in (("val_loss", "min"), ("val_accuracy", "max")):
        scheduler = lr_scheduler.ReduceLROnPlateau(life.optimizer, mode=mode, patience=0)
        callbacks.append(LRSchedule(scheduler, monitor=name))
    callbacks[0].on_epoch_end(0, {"val_loss": 2.0})
    life.clock.step = 1
    callbacks[1].load_state_dict(callbacks[0].state_dict())
    callbacks[1].on_train_begin(life.run_info())
    for epoch, accuracy in enumerate((0.1, 0.2, 0.3)):
        callbacks[1].on_epoch_end(epoch, {"val_accuracy": accuracy})
    assert life.lr == 1.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: lr_scheduler.StepLR(o, 3), None),
        (lambda o: lr_scheduler.StepLR(o, 4, gamma=0.5), "step_size 3, not 4, gamma 0.1, not 0.5"),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.1), "StepLR"),
    ],
)
def test_a_resume_with_other_settings_says_which_it_keeps(make, words, caplog):
    earlier = LRSchedule(lr_scheduler.StepLR(optimizer(), 3))
    LRSchedule(make(optimizer())).load_state_dict(json.loads(json.dumps(earlier.state_dict())))
    assert [record.message for record in caplog.records if words and words in record.message] or not words
    assert len(caplog.records) == (words is not None)


def test_a_resume_with_another_base_rate_says_that_it_keeps_the_earlier_one(caplog):
    earlier, other = optimizer(), optimizer()
    other.param_groups[0]["lr"] = 0.5
    state = LRSchedule(lr_scheduler.StepLR(earlier, 3)).state_dict()
    LRSchedule(lr_scheduler.StepLR(other, 3)).load_state_dict(state)
    assert "base_lrs [1.0, 0.3], not [0.5, 0.3]" in caplog.text


def test_rates_held_in_tensors(tmp_path):
    life = Life(tmp_path)
    one = torch.optim.SGD(life.model.parameters(), lr=torch.tensor(1.0))
    callback = LRSchedule(lr_scheduler.StepLR(one, 1))
    one.step()
    callback.on_epoch_end(0, {})
    state = callback.state_dict()
    two = torch.optim.SGD(life.model.parameters(), lr=torch.tensor(1.0))
    tensor = two.param_groups[0]["lr"]
    LRSchedule(lr_scheduler.StepLR(two, 1)).load_state_dict(state)
    assert two.param_groups[0]["lr"] is tensor
    assert float(tensor) == pytest.approx(0.1)


def test_another_optimizer_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="another optimizer than the one that trains"):
        LRSchedule(lr_scheduler.StepLR(optimizer(), 1)).on_train_begin(Life(tmp_path).run_info())


def test_a_scheduler_that_is_shorter_than_the_run_is_named():
    one = optimizer()
    schedule = LRSchedule(lr_scheduler.OneCycleLR(one, 1.0, total_steps=2), interval="step")
    for _ in range(2):
        one.step()
        schedule.on_step_end(report())
    with pytest.raises(TrainingError, match="OneCycleLR"):
        schedule.on_step_end(report())


def test_a_rate_that_torch_rounds_to_less_than_0_is_0():
    one = optimizer()
    schedule = LRSchedule(lr_scheduler.LinearLR(one, 1 / 3, 0.0, 4), interval="step")
    for step in range(8):
        schedule.on_step_begin(step)
        one.step()
        schedule.on_step_end(report())
    assert min(rates(one)) < 0


@pytest.mark.parametrize("slope", [-0.5, float("inf")])
def test_a_rate_that_torch_would_use_to_climb_is_refused(slope):
    """A scheduler may end below 0 where the run is longer than it; a rate after the last step is not used."""
    one = optimizer()
    schedule = LRSchedule(lr_scheduler.LambdaLR(one, lambda step: 1 + slope * step if step else 1), interval="step")
    for step in range(3 if slope < 0 else 1):
        schedule.on_step_begin(step)
        one.step()
        schedule.on_step_end(report())
    with pytest.raises(TrainingError, match=r"LambdaLR gave the learning rate .* for step 3"):
        schedule.on_step_begin(3)


def test_mistakes_in_arguments():
    plateau, step = lr_scheduler.ReduceLROnPlateau(optimizer()), lr_scheduler.StepLR(optimizer(), 1)
    for arguments in ({}, {"monitor": "loss", "interval": "step"}):
        with pytest.raises(
            ConfigError, match="ReduceLROnPlateau needs monitor, such as 'val_loss', and interval='epoch'"
        ):
            LRSchedule(plateau, **arguments)
    with pytest.raises(ConfigError, match="StepLR uses no metric; remove monitor"):
        LRSchedule(step, monitor="loss")
    with pytest.raises(ConfigError, match="interval must be 'epoch' or 'step', found 'batch'"):
        LRSchedule(step, interval="batch")
