"""Captured steps: the same weights as usual steps, whatever changes in between.

A recorder of its own stands in for CUDA graphs: it runs the function and undoes it. Real graphs: tests/gpu.
"""

from copy import deepcopy

import numpy as np
import pytest
import torch
from captured_steps import assert_same, batches, make, weights
from torch import nn

from etude.engine import capture as module
from etude.engine.capture import MOST_FORMS, WARM_UP_STEPS
from etude.losses import ClassificationLoss, SupervisedTask


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
