"""Recorded steps: the same weights as usual steps, whatever changes in between; usual steps where they cannot be.

Here a recorder of its own stands in for CUDA graphs: it runs the function and undoes it. Real graphs: tests/gpu.
"""

import gc
import random
import re
import weakref
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from etude.core import TrainingError
from etude.engine import capture as module
from etude.engine.capture import MOST_FORMS, WARM_UP_STEPS, Capture
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import AdamW
from stub_recorder import RunAgain


def make(model=None, **options):
    torch.manual_seed(0)
    model = (
        model if model is not None else nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    updater = Updater(AdamW(trained, lr=1e-2), clip_norm=1.0)
    task = options.pop("task", None) or SupervisedTask(ClassificationLoss())
    step = Step(model, task, updater, MixedPrecision("fp32"), metrics=True)
    recorder = RunAgain(step, options.pop("share", 1.0), options.pop("room", True))
    step.capture = Capture(step, recorder, **options)
    notices = []
    step.notice = notices.append
    return step, step.capture, notices


def batches(count, rows=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


def weights(step):
    return {name: value.clone() for name, value in step.model.state_dict().items()}


def assert_same(one, other):
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("micro", [1, 2])
def test_recorded_and_usual_steps_have_the_same_weights_and_numbers(micro):
    recorded, capture, notices = make()
    usual, _, _ = make()
    usual.capture = None
    data = [*batches(10), *batches(1, rows=3), *batches(10, seed=2)]
    for start in range(0, len(data) - micro + 1, micro):
        mine, theirs = recorded(data[start : start + micro]), usual(data[start : start + micro])
        for name in theirs.sums:
            assert float(mine.sums[name]) == float(theirs.sums[name])
            assert float(mine.counts[name]) == float(theirs.counts[name])
        assert float(mine.norm) == float(theirs.norm)
        assert float(mine.skipped) == float(theirs.skipped) == 0
    assert_same(weights(recorded), weights(usual))
    assert capture.recorder.replayed > 3
    assert notices == ["steps are captured as CUDA graphs"]


def test_a_report_stays_as_it_is_when_the_next_step_is_replayed():
    step, _, _ = make()
    reports = [step([batch]) for batch in batches(8)]
    again, _, _ = make()
    again.capture = None
    for report, batch in zip(reports, batches(8), strict=True):
        assert float(report.sums["loss"]) == float(again([batch]).sums["loss"])


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step.model[0].weight.requires_grad_(False),
        lambda step: step.model[1].eval(),
        lambda step: step.updater.optimizer.param_groups[0].update(weight_decay=0.5),
        lambda step: step.updater.optimizer.param_groups[0].update(lr=0.5),
        lambda step: step.updater.optimizer.load_state_dict(deepcopy(step.updater.optimizer.state_dict())),
        lambda step: setattr(step.model[3].weight, "data", step.model[3].weight.data * 2),
        lambda step: step.model[0].register_forward_hook(lambda _module, _inputs, output: output * 2),
        lambda step: setattr(step, "metrics", False),
        lambda step: setattr(step.updater, "clip_norm", 0.01),
        lambda step: setattr(step.model[1], "momentum", 0.5),
        lambda step: setattr(step.model[1], "eps", np.float32(0.5)),
        lambda step: setattr(step.model[0], "more", 2),
        lambda step: step.model[3].register_full_backward_hook(lambda _module, grads, _: (grads[0],)),
        lambda step: step.model[0].weight.register_hook(lambda grad: grad * 2),
        lambda step: step.updater.optimizer.register_step_post_hook(lambda *_: None),
        lambda step: step.model.__setitem__(2, nn.Tanh()),
        lambda step: setattr(step.model[0], "bias", nn.Parameter(torch.ones(8), requires_grad=False)),
        lambda step: setattr(step.model[1].running_mean, "data", torch.ones(8)),
    ],
)
def test_what_the_host_changes_between_steps_counts(change):
    recorded, capture, _ = make()
    usual, _, _ = make()
    usual.capture = None
    for place, batch in enumerate(batches(12)):
        if place == 6:
            change(recorded), change(usual)
        recorded([batch]), usual([batch])
    assert_same(weights(recorded), weights(usual))
    assert capture.recorder.recorded == 2


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


def test_a_setting_of_the_loss_that_changes_between_steps_counts():
    losses, steps = [ClassificationLoss(), ClassificationLoss()], []
    for loss in losses:
        steps.append(make(task=SupervisedTask(loss)))
    steps[1][0].capture = None
    for place, batch in enumerate(batches(12)):
        for loss, (step, _, _) in zip(losses, steps, strict=True):
            loss.label_smoothing = 0.0 if place < 6 else 0.3
            step([batch])
    assert_same(weights(steps[0][0]), weights(steps[1][0]))
    assert steps[0][1].recorder.recorded == 2


def test_one_hook_in_the_place_of_another_counts():
    step, capture, _ = make()
    handle = step.model[0].register_forward_hook(lambda _module, _inputs, output: output)
    for place, batch in enumerate(batches(12)):
        if place == 6:
            handle.remove()
            step.model[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
        step([batch])
    assert capture.recorder.recorded == 2


class Follows(nn.Module):
    """Has weights that no optimizer knows, and changes them and its input."""

    def __init__(self):
        super().__init__()
        self.layer, self.slow = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x):
        x.add_(1.0)
        with torch.no_grad():
            self.slow.weight.lerp_(self.layer.weight, 0.5)
        return self.layer(x) + self.slow(x)


def test_what_a_step_changes_beside_the_weights_is_changed_once():
    (recorded, capture, notices), (usual, _, _) = make(Follows()), make(Follows())
    recorded.model.load_state_dict(usual.model.state_dict())
    usual.capture = None
    for mine, theirs in zip(batches(8), batches(8), strict=True):
        recorded([mine]), usual([theirs])
    assert capture.recorder.replayed
    assert notices == ["steps are captured as CUDA graphs"]
    assert_same(weights(recorded), weights(usual))


def test_nothing_is_recorded_before_the_first_finite_update():
    step, capture, _ = make()
    for batch in batches(2 * WARM_UP_STEPS):
        step([(batch[0] * float("nan"), batch[1])])
    assert capture.recorder.recorded == 0
    for batch in batches(2):
        step([batch])
    assert capture.recorder.recorded == 1


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

    def wrong(function):
        result, replay = record(function)

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

    def interrupted(function):
        def run():
            function()
            torch.rand(3)  # as dropout on a device would
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                ends(error)
                raise

        return record(run)

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
    seen = []
    step.watchers = [seen.append]
    for batch in batches(6):
        step([batch])
    assert len(seen) == 6
    assert capture.recorder.recorded == 0
    assert "gradients" in notices[-1]


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


def test_a_state_is_copied_to_the_host_unless_it_is_large():
    small = torch.empty(2**20, device="meta")  # stands in for a GPU
    assert {copy.device.type for copy in module._room_for([small, small])} == {"cpu"}
    large = torch.empty(2**30 + 1, device="meta")
    assert {copy.device.type for copy in module._room_for([small, large])} == {"meta"}


def test_few_graphs_are_kept_and_batches_of_ever_other_lengths_are_not_recorded(monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    step, capture, _ = make()
    for rows in (3, 4, 5, 6, 3):
        for batch in batches(5, rows=rows):
            step([batch])
    assert len(capture._graphs) == 2
    assert capture.recorder.recorded == 5
    for rows in 30 * [3, 4, 5]:  # one too many for two graphs: recording takes longer than it saves
        for batch in batches(WARM_UP_STEPS, rows=rows):
            step([batch])
    assert capture.recorder.recorded < 20
    step, capture, notices = make()
    for rows in range(2, MOST_FORMS + 5):
        step([batches(1, rows=rows)[0]])
    assert capture.recorder.recorded == 0
    assert "form" in notices[-1]
