"""A weighting that compares losses before and after an update sees them with the same dropout."""

import pytest
import torch
from torch import nn

from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from etude.multitask.weighting import FAMO

TASKS = ("kind", "sign")


class Watched(FAMO):
    """Remembers the losses that it is shown."""

    def after_update(self, before, after, scale=None):
        self.seen = (before, after)
        super().after_update(before, after, scale)


def batches(number):
    x = torch.randn(8 * number, 5, generator=torch.Generator().manual_seed(1))
    labels = {"kind": x[:, :3].argmax(1), "sign": (x[:, 4] > 0).long()}
    return [
        {"input": x[i::number], **{key: value[i::number] for key, value in labels.items()}} for i in range(number)
    ]


def step_with(weighting, lr, number):
    """Return the step's report, and the random number that comes after it."""
    torch.manual_seed(0)
    heads = {task: LinearHead(size, in_features=6) for task, size in zip(TASKS, (3, 2), strict=True)}
    model = MultiTaskModel(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5)), heads)
    task = MultiTask({name: TaskSpec(name, ClassificationLoss(), labels=name) for name in TASKS}, weighting)
    task.join(model)
    step = Step(model, task, Updater(torch.optim.SGD(model.parameters(), lr=lr)), MixedPrecision())
    torch.manual_seed(7)
    return step(batches(number)), torch.rand(1)


@pytest.mark.parametrize("number", [1, 3])
def test_losses_before_and_after_an_update_differ_by_the_update_alone(number):
    still, moved = Watched(TASKS), Watched(TASKS)
    report, _ = step_with(still, 0.0, number)
    before, after = still.seen
    assert before.equal(after)
    # Those before are the losses that the step has descended.
    losses = torch.stack([report.sums[f"{name}/loss"] / report.counts[f"{name}/loss"] for name in TASKS])
    torch.testing.assert_close(before, losses)
    step_with(moved, 0.1, number)
    assert (moved.seen[1] < before).all()


@pytest.mark.parametrize("number", [1, 3])
def test_looking_again_takes_no_random_numbers_from_the_run(number):
    assert step_with(FAMO(TASKS), 0.1, number)[1].equal(step_with(None, 0.1, number)[1])
