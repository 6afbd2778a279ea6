"""Steps that take turns: only the parameters of a turn change; a GAN learns, resumes exactly, and is recorded."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import AlternatingTask, Callback, LossTerm, Trainer
from etude.core import ConfigError
from etude.engine.capture import Capture
from stub_recorder import RunAgain

ANGLE = torch.linspace(0, 2 * math.pi, 1025)[:-1]
RING = 2 * torch.stack([ANGLE.cos(), ANGLE.sin()], 1)


def mlp(*sizes):
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.LeakyReLU(0.2))]
    return nn.Sequential(*layers[:-1])


class Gan(AlternatingTask):
    turns = {"judging": "judge", "making": ["maker"]}  # noqa: RUF012
    draws = True

    def __call__(self, model, batch, *, metrics):
        real = batch.data
        noise = torch.randn(len(real), 4) if self.draws else real.repeat(1, 2)
        fake = model["maker"](noise) + model["shared"]
        terms = {}
        if self.turn != "making":
            losses = F.softplus(-model["judge"](real)) + F.softplus(model["judge"](fake))
            terms["judging"] = LossTerm(losses.sum(), len(real))
        if self.turn != "judging":
            terms["making"] = LossTerm(F.softplus(-model["judge"](fake)).sum(), len(real))
        if metrics:
            terms["off_ring"] = LossTerm((fake.norm(dim=1) - 2).abs().sum(), len(real), weight=0.0)
        return terms


class Model(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = mlp(4, hidden, hidden, 2), mlp(2, hidden, hidden, 1)
        self.shared = nn.Parameter(torch.zeros(2))  # of no turn

    def __getitem__(self, name):
        return getattr(self, name)


class Follow(Callback):
    """Keeps which parameters every step changed."""

    def on_train_begin(self, run):
        self.model, self.changed = run.model, []
        self.on_step_end(None)
        self.changed.clear()

    def on_step_end(self, report):
        now = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        before = getattr(self, "now", now)
        self.changed.append({name.split(".")[0] for name in now if not torch.equal(now[name], before[name])})
        self.now = now


def run(epochs, folder=None, *, task=None, resume=False, callbacks=(), hidden=16, one=False, **settings):
    model = Model(hidden)
    config = {"epochs": epochs, "batch_size": 128, "device": "cpu", "validate_interval": 0, **settings}
    groups = [[*model.maker.parameters(), model.shared], model.judge.parameters()]
    made = [torch.optim.Adam(group, lr=2e-3, betas=(0.5, 0.9)) for group in groups]
    return Trainer(
        model,
        RING,
        RING,
        config=config,
        optimizer=None if one else made,
        task=Gan() if task is None else task,
        callbacks=callbacks,
        progress=False,
        output_dir=folder,
        resume=resume,
    )


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("settings", [{}, {"grad_accum_steps": 2, "batch_size": 64}])
@pytest.mark.parametrize("steps", [{}, {"judging": 3}])
def test_a_turn_changes_its_own_parameters(one, settings, steps):
    follow, task = Follow(), Gan()
    task.steps = steps
    run(1, task=task, callbacks=[follow], one=one, **settings).train()
    cycle = ["judge"] * steps.get("judging", 1) + ["maker"]
    expected = [{cycle[step % len(cycle)], "shared"} for step in range(8)]
    assert len(follow.changed) == 8
    assert follow.changed == expected


@pytest.mark.parametrize("epochs", [1, 2])
def test_frozen_parameters_stay_frozen(epochs):
    trainer = run(epochs, freeze=["maker.0", "shared"], unfreeze={1: "maker.0"})
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    same = {name for name, value in trainer.model.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"shared", *(["maker.0.weight", "maker.0.bias"] if epochs == 1 else [])}


@pytest.mark.parametrize("steps", [1, 2])
def test_afterwards_the_model_can_be_trained_again(steps):
    trainer = run(1, freeze="shared", max_steps=steps)
    trainer.train()
    frozen = {name for name, param in trainer.model.named_parameters() if not param.requires_grad}
    assert frozen == {"shared"}


@pytest.mark.slow
def test_it_learns_the_ring():
    trainer = run(160, hidden=32)
    assert trainer.train()["val_off_ring"] < 0.3
    points = trainer.model.maker(torch.randn(1000, 4, generator=torch.Generator().manual_seed(1)))
    angles = torch.histc(torch.atan2(points[:, 1], points[:, 0]).detach(), 8, -math.pi, math.pi)
    assert angles.min() > 20  # all around


@pytest.mark.parametrize("stop", [3, 4, 11])
def test_resumed_run_is_the_uninterrupted_one(stop, tmp_path):
    whole = run(3)
    expected = whole.train()
    run(3, tmp_path, max_steps=stop).train()
    resumed = run(3, tmp_path, resume=True)
    found = resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert found["val_making"] == expected["val_making"]


def test_recorded_steps_are_the_usual_ones():
    def task():
        made = Gan()
        made.draws, made.steps = False, {"judging": 2}  # random numbers of the CPU cannot be recorded
        return made

    usual, recorded = run(3, task=task()), run(3, task=task())
    capture = recorded.step.capture = Capture(recorded.step, RunAgain(recorded.step))
    usual.train(), recorded.train()
    assert capture.recorder.recorded == 2
    assert capture.recorder.replayed > 8
    for name, value in usual.model.state_dict().items():
        torch.testing.assert_close(value, recorded.model.state_dict()[name])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"turns": {}}, "turns"),
        ({"turns": {"judging": "jugde", "making": "maker"}}, "judge"),
        ({"steps": {"jugding": 2}}, "jugding"),
        ({"steps": {"judging": 0}}, "at least 1"),
    ],
)
def test_mistakes_are_refused_before_training(changes, word):
    task = Gan()
    vars(task).update(changes)
    with pytest.raises(ConfigError, match=word):
        run(1, task=task)
