"""Steps that are not captured: run as usual, with the reason in one notice. A recorder stands in for CUDA graphs."""

import gc
import random
import re
import weakref

import pytest
import torch
from captured_steps import assert_same, batches, make, weights
from torch import nn

from etude import Callback, GradientMonitor
from etude.core import TrainingError
from etude.engine.capture import MOST_FORMS, WARM_UP_STEPS
from etude.losses import SupervisedTask
from stub_recorder import RunAgain


class Odd(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer, self.odd, self.count, self.seen = nn.Linear(6, 3), forward, 0, []
        self.kept, self.generator = torch.zeros(()), random.Random(0)

    def forward(self, x):
        return self.odd(self, self.layer(x))


def grows(module, x):  # a number of the host that changes: a graph would keep the first
    module.count += 1
    return x * float(module.count)


def draws(_module, x):
    return x * random.random()


def draws_from_its_own(module, x):
    return x * module.generator.random()


def lists(module, x):
    module.seen.append(x.shape)
    return x


SEEN = {"calls": 0}


def counts_in_a_global(_module, x):
    SEEN["calls"] += 1
    return x * float(SEEN["calls"])


def keeps_a_tensor(module, x):  # the next step would read the first one for ever
    module.kept = 0.9 * module.kept + x.detach().mean()
    return x - module.kept


def fails(_module, x):
    if RunAgain.is_recording:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    return x


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (draws, "random numbers"),
        (draws_from_its_own, "generator"),
        (grows, "Odd.*count"),
        (lists, "Odd.*seen"),
        (counts_in_a_global, "SEEN"),
        (keeps_a_tensor, "Odd.*kept"),
        (fails, "not permitted.*test_engine_capture"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_run_as_usual_and_said_once(odd, words):
    step, capture, notices = make(Odd(odd))
    for batch in batches(2 * WARM_UP_STEPS)[:WARM_UP_STEPS]:
        step([batch])
    step.model.odd = lambda _module, x: x
    for batch in batches(5):
        step([batch])
    (notice,) = notices
    assert re.search(words, notice)
    assert capture.refused
    assert capture.recorder.recovered == (odd is fails)


def test_nothing_of_a_recording_that_failed_is_kept_alive():
    """Else the next backward pass finds autograd nodes that belong to the stream of the recording."""
    outputs = []

    def fails_with_an_output(_module, x):
        if RunAgain.is_recording:
            outputs.append(weakref.ref(x))
            raise RuntimeError("operation not permitted when stream is capturing")
        return x

    step, capture, _ = make(Odd(fails_with_an_output))
    gc.collect()
    gc.disable()
    try:
        for batch in batches(WARM_UP_STEPS):
            step([batch])
        assert capture.refused
        assert [one() for one in outputs] == [None]
    finally:
        gc.enable()


def counting_loss():
    calls = 0

    def loss(predictions, labels):
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(predictions, labels) * min(1.0, calls / 1000)

    return loss


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, predictions, labels):
        self.calls += 1
        return nn.functional.cross_entropy(predictions, labels) * min(1.0, self.calls / 1000)


@pytest.mark.parametrize("loss", [counting_loss, CountingLoss])
def test_a_loss_that_counts_its_calls_is_not_recorded(loss):
    step, capture, notices = make(task=SupervisedTask(loss()))
    for batch in batches(12):
        step([batch])
    assert capture.recorder.recorded == 0
    assert "calls" in notices[-1]


def test_a_number_that_changes_with_every_step_ends_it_with_the_reason():
    step, capture, notices = make()
    for place, batch in enumerate(batches(60)):
        step.model[1].momentum = 0.1 + place / 1000
        step([batch])
    assert capture.recorder.recorded < 10
    assert "numbers that modules keep" in notices[-1]
    step, capture, notices = make()
    for place, batch in enumerate(batches(MOST_FORMS + 5)):
        step.updater.optimizer.param_groups[0]["betas"] = 0.9 + place * 1e-4, 0.99
        step([batch])
    assert capture.recorder.recorded == 0
    assert "settings of the optimizer" in notices[-1]


def test_batches_with_objects_of_unknown_content_are_not_recorded():
    step, capture, notices = make()
    for x, y in batches(6):
        step([{"input": x, "labels": y, "more": object()}])
    assert capture.recorder.recorded == 0
    assert "object" in notices[-1]


def test_a_recorded_step_that_does_something_else_is_found_and_undone():
    """The stand-in calls the model again, so what would be frozen in a graph is made to differ by hand."""
    step, capture, notices = make()
    usual, _, _ = make()
    usual.capture = None
    record = capture.recorder.record

    def wrong(function, random):
        result, replay = record(function, random)

        def replay_wrongly():
            replay()
            with torch.no_grad():
                step.model[0].weight.add_(1.0)

        return result, replay_wrongly

    capture.recorder.record = wrong
    for batch in batches(8):
        step([batch]), usual([batch])
    assert_same(weights(step), weights(usual))
    assert "differs" in notices[-1]


def ends_badly(error):
    raise RuntimeError("operation failed due to a previous error during capture") from error


@pytest.mark.parametrize("ends", [lambda _error: None, ends_badly], ids=["ends", "ends badly"])
def test_ctrl_c_while_recording_leaves_the_device_in_order_and_is_not_swallowed(ends):
    step, capture, notices = make()
    record = capture.recorder.record

    def interrupted(function, random):
        def run():
            function()
            torch.rand(3)  # as dropout on a device would
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                ends(error)
                raise

        return record(run, random)

    capture.recorder.record = interrupted
    *data, last = batches(WARM_UP_STEPS)
    for batch in data:
        step([batch])
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        step([last])
    assert capture.recorder.recovered == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert not notices


def test_where_capture_is_needed_a_reason_against_it_is_an_error():
    step, _, _ = make(Odd(draws), needed=True)
    for batch in batches(WARM_UP_STEPS - 1):
        step([batch])
    with pytest.raises(TrainingError, match=r"training\.capture"):
        step(batches(1))


def test_gradients_that_a_callback_looks_at_are_those_of_usual_steps():
    step, capture, notices = make()
    watcher, seen = Callback(), []
    watcher.on_gradients = seen.append
    step.watchers = [watcher]
    for batch in batches(6):
        step([batch])
    assert len(seen) == 6
    assert capture.recorder.recorded == 0
    assert "gradients" in notices[-1]


def test_steps_that_the_gradient_monitor_does_not_look_at_are_captured():
    def trained(capture):
        step, found, _ = make()
        step.capture = found if capture else None
        monitor = GradientMonitor(every=5, log_layers=True)
        step.watchers, norms = [monitor], []
        for batch in batches(20):
            if step.clock.step == 16:  # a skipped update was logged: every step is looked at until the next log point
                monitor.on_log({"skipped": 1.0})
            if step.clock.step == 18:
                monitor.on_log({"skipped": 0.0})
            monitor.on_step_begin(step.clock.step)
            step([batch])
            step.clock.step += 1
            norms.append((monitor._looked_at, monitor.numbers()))
        return step, found.recorder.replayed, norms

    step, replayed, norms = trained(capture=True)
    usual, _, expected = trained(capture=False)
    assert [looked_at for looked_at, _ in norms] == [*[1] * 5, *[6] * 5, *[11] * 5, 16, 17, 18, 18, 18]
    assert norms == expected
    assert_same(weights(step), weights(usual))
    looked_at, warming_up = 6, WARM_UP_STEPS
    assert replayed == 20 - looked_at - warming_up


@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("needed", [True, False])
def test_a_busy_device_with_little_memory_is_left_alone(share, room, needed):
    step, capture, notices = make(share=share, room=room, needed=needed)
    for batch in batches(6):
        step([batch])
    is_recorded = share == 1.0 or room or needed
    assert capture.recorder.recorded == is_recorded
    assert bool(notices) == is_recorded
