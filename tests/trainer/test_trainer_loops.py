"""The loops by epoch and from plain functions: every setting acts, numbers are exact, state goes on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loop_parts import data, functions, model, parameters, run
from torch import nn

from etude import (
    BasicTrainingLoop,
    Callback,
    DataLoader,
    EarlyStopping,
    GradientAccumulator,
    TrainingLoop,
    TrainingMetrics,
    ValidationLoop,
)
from etude.core import CheckpointError, ConfigError
from etude.optim import AdamW


@pytest.mark.parametrize("known", ["both", "module"])
@pytest.mark.parametrize("steps", [2, 3, {0: 1, 1: 4}])
def test_accumulation_equals_the_large_batch(known, steps):
    """Also where the last micro-batches of an epoch are fewer and smaller."""
    one, other = model(), model()
    run(TrainingLoop(gradient_accumulator=GradientAccumulator(accumulation_steps=steps)), one, known, batch_size=8)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.2)
    x, y = data()
    for epoch in range(2):
        size = 8 * (steps if isinstance(steps, int) else (1, 4)[epoch])
        for start in range(0, len(x), size):
            optimizer.zero_grad()
            F.cross_entropy(other(x[start : start + size]), y[start : start + size]).backward()
            optimizer.step()
    torch.testing.assert_close(parameters(one), parameters(other))


def test_accumulation_for_another_optimizer_or_unknown_parameters_is_refused():
    one = model()
    accumulator = GradientAccumulator(AdamW(one.parameters()), accumulation_steps=2)
    with pytest.raises(ConfigError, match="another optimizer"):
        run(TrainingLoop(gradient_accumulator=accumulator), one)
    with pytest.raises(ConfigError, match="accumulated without knowing the parameters"):
        run(TrainingLoop(gradient_accumulator=GradientAccumulator(accumulation_steps=2)), one, "nothing")


@pytest.mark.parametrize("known", ["both", "module", "nothing"])
def test_mixed_precision_acts_on_the_forward_pass(known):
    for use_amp, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        one, seen = model(), set()
        one[0].register_forward_hook(lambda module, inputs, output, seen=seen: seen.add(output.dtype))
        run(TrainingLoop(use_amp=use_amp), one, known)
        assert seen == {dtype}


def test_clipping_may_be_changed_between_epochs():
    """The attributes are what counts, in either door."""

    class Norms(Callback):
        def on_step_end(self, report):
            self.moved = (parameters(one) - before[0]).norm().item()
            before[0] = parameters(one)

    norms = Norms()
    loop = TrainingLoop(clip_gradients=False, max_grad_norm=1e-3, callbacks=[norms])
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
    loader = DataLoader(*data(), 44)
    for door in ("objects", "functions"):
        for clip, limit in ((False, None), (True, 1e-3), (True, 1e-5)):
            loop.clip_gradients = clip
            loop.max_grad_norm = limit or loop.max_grad_norm
            before = [parameters(one)]
            if door == "objects":
                loop.train_epoch(one, loader, optimizer)
            else:
                loop.run_epoch(*functions(one, optimizer, "both"), loader, TrainingMetrics())
            assert norms.moved > 1e-2 if limit is None else norms.moved == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_not_positive_is_refused(norm):
    with pytest.raises(ConfigError, match="max_grad_norm"):
        run(TrainingLoop(clip_gradients=True, max_grad_norm=norm), model())


def test_a_callback_stops_the_run_and_sees_validation():
    metrics = run(TrainingLoop(callbacks=[EarlyStopping("loss", patience=0, min_delta=9.0)]), model(), epochs=50)
    assert metrics.current_epoch == 1
    loader = DataLoader(*data(), 5, shuffle=False)
    one = model()
    metrics = run(TrainingLoop(), one, epochs=3, val_loader=loader)
    x, y = data()
    assert metrics.val_loss == pytest.approx(F.cross_entropy(one(x), y).item(), rel=1e-5)
    assert metrics.val_accuracy == pytest.approx((one(x).argmax(1) == y).float().mean().item())
    assert metrics.best_epoch in range(3)


def test_epochs_of_one_loop_see_the_data_in_new_orders():
    seen = []
    one = model()
    one.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].clone()))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
    loop, loader = TrainingLoop(), DataLoader(*data(), 44)
    for _ in range(2):  # the epoch of the metrics is left at 0
        loop.run_epoch(*functions(one, optimizer, "module"), loader, TrainingMetrics())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0].sort(0).values, seen[1].sort(0).values)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"clip_gradients": True}, "clip_gradients"),
        ({"use_amp": True}, "use_amp"),
        ({"callbacks": [EarlyStopping("loss")]}, "callbacks"),
        ({"gradient_accumulator": GradientAccumulator(accumulation_steps=2)}, "gradient_accumulator"),
    ],
)
def test_settings_that_cannot_act_on_a_step_of_ones_own_are_refused(settings, name):
    with pytest.raises(ConfigError, match=name):
        TrainingLoop(**settings).run_epoch_manual(*data(), 8, lambda x, y: 0.0, 1, 1)


def test_should_stop_tells_the_outer_loop():
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
    loop = TrainingLoop(callbacks=[EarlyStopping("loss", patience=2, min_delta=1e-3)])
    for epoch in range(20):
        loop.train_epoch(one, DataLoader(*data(), 44), optimizer, epoch=epoch)
        if loop.should_stop:
            break
    assert epoch == 2
    assert "loss has not improved" in loop.control.reason
    loop.train_epoch(one, DataLoader(*data(), 44), optimizer, epoch=3)  # who goes on all the same is not hindered
    assert loop.clock.step == 4


class StopAt(Callback):
    """Asks to stop after a step, or interrupts."""

    def __init__(self, step, raises=False):
        super().__init__()
        self.step, self.raises = step, raises

    def on_step_end(self, report):
        self.step -= 1
        if self.step == 0:
            if self.raises:
                raise KeyboardInterrupt
            self.control.request_stop("enough")


def test_an_epoch_that_is_stopped_has_the_numbers_of_its_steps():
    one = model()
    loop = TrainingLoop(callbacks=[StopAt(2)])
    result = loop.train_epoch(one, DataLoader(*data(), 8), AdamW(one.parameters()))
    assert (result.num_samples, loop.should_stop, loop.control.reason) == (16, True, "enough")
    assert 0 < result.loss < 5


@pytest.mark.parametrize("door", ["objects", "functions"])
@pytest.mark.parametrize("stop_at", [2, 5, 6, 9])
def test_state_goes_on_inside_an_epoch_bit_for_bit(door, stop_at):
    def make():
        one = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 3))
        with torch.no_grad():
            for p in one.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        return one, AdamW(one.parameters(), lr=0.01)

    def train(loop, one, optimizer):
        loader = DataLoader(*data(), 8, seed=4)
        if door == "functions":
            loop.run(*functions(one, optimizer, "both"), loader, 3, TrainingMetrics())
            return
        for epoch in range(loop.clock.epoch, 3):
            loop.train_epoch(one, loader, optimizer, lambda step: 0.8**step if door == "objects" else 1.0, epoch)
            if loop.should_stop:
                return

    accumulator = GradientAccumulator(accumulation_steps={0: 1, 1: 2})
    straight, optimizer = make()
    torch.manual_seed(5)
    train(TrainingLoop(gradient_accumulator=accumulator), straight, optimizer)

    first, optimizer = make()
    loop = TrainingLoop(gradient_accumulator=accumulator, callbacks=[StopAt(stop_at)])
    torch.manual_seed(5)
    train(loop, first, optimizer)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict(), loop.state_dict()))
    second, optimizer = make()
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    loop = TrainingLoop(gradient_accumulator=accumulator, callbacks=[StopAt(10**9)])
    torch.rand(3)
    loop.load_state_dict(saved[2])
    train(loop, second, optimizer)
    assert torch.equal(parameters(straight), parameters(second))


def test_another_model_begins_a_new_run():
    loop, ends = TrainingLoop(), []
    for one in (model(), model()):
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        loader = DataLoader(*data(), 44)
        ends.append(
            [loop.train_epoch(one, loader, optimizer, lambda step: 0.5**step, epoch).lr for epoch in range(3)]
        )
    assert ends == [[1.0, 0.5, 0.25]] * 2


def test_a_fit_goes_on_from_its_state():
    def make():
        one = model()
        return one, AdamW(one.parameters(), lr=0.05)

    settings = {"config": {"batch_size": 8, "warmup_steps": 4}, "progress": False}
    straight, optimizer = make()
    BasicTrainingLoop(straight, optimizer, callbacks=[EarlyStopping("loss")], **settings).fit(data(), epochs=4)
    one, optimizer = make()
    loop = BasicTrainingLoop(one, optimizer, callbacks=[StopAt(9), EarlyStopping("loss")], **settings)
    loop.fit(data(), epochs=4)
    saved = copy.deepcopy((one.state_dict(), optimizer.state_dict(), loop.state_dict()))
    other, optimizer = make()
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    loop = BasicTrainingLoop(other, optimizer, callbacks=[StopAt(10**9), EarlyStopping("loss")], **settings)
    loop.load_state_dict(saved[2])
    loop.fit(data(), epochs=4)
    assert torch.equal(parameters(straight), parameters(other))


@pytest.mark.parametrize("loop", [TrainingLoop(), ValidationLoop(), BasicTrainingLoop(model())])
def test_a_state_of_something_else_is_refused(loop):
    with pytest.raises(CheckpointError, match="clock"):
        loop.load_state_dict({"model": {}})


def test_the_count_of_a_validation_callback_goes_on():
    one, loader = model(), DataLoader(*data(), 44)
    loop = ValidationLoop(callbacks=[EarlyStopping(patience=3)])
    for epoch in range(3):
        loop.validate_epoch(one, loader, epoch)
    other = ValidationLoop(callbacks=[EarlyStopping(patience=3)])
    other.load_state_dict(copy.deepcopy(loop.state_dict()))
    other.validate_epoch(one, loader, 3)
    assert other.should_stop
    assert not loop.should_stop


def test_a_loop_keeps_what_its_loss_has_decided():
    """By the first batch the loss is cross entropy; by the others alone it could be that of something else."""
    loop, other = TrainingLoop(), TrainingLoop()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.train_epoch(model, [(torch.randn(8, 4), torch.arange(8) % 3)], optimizer)
    assert loop.task.decisions()
    other.load_state_dict(loop.state_dict())
    assert other.task.decisions() == loop.task.decisions()
