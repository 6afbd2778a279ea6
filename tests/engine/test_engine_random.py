"""The random numbers of a run are its own: hooks, validation, other runs and the program around it change nothing."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from etude import Trainer
from etude.core.buffers import probing
from etude.core.random import RunRandom, aside, rng_state, set_seed
from etude.engine.callback import HOOKS, Callback
from etude.engine.callback_list import CallbackList

STEP_HOOKS = {"on_step_begin", "on_gradients", "on_step_end"}
OTHER_HOOKS = sorted(set(HOOKS) - STEP_HOOKS)


def draw():
    """Draw from every generator, an odd number of times."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(3)[0]),
    ]


class DrawingEverywhere(Callback):
    """Draws in every hook that is not part of a step."""

    def __init__(self, hooks=OTHER_HOOKS):
        super().__init__()
        self.drawn = {}
        for name in hooks:
            setattr(self, name, lambda *args, name=name: self._draw(name))

    def _draw(self, name):
        self.drawn.setdefault(name, []).append(draw())

    def numbers(self):
        draw()
        return {}


class Noisy(nn.Module):
    """Draws in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x + 0.1 * torch.randn_like(x) + 0.01 * random.random() + 0.01 * np.random.rand())


def data(count=40):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def make(seed=0, folder=None, callbacks=(), validation=True, **config):
    torch.manual_seed(11)
    settings = {"epochs": 3, "batch_size": 8, "seed": seed, "log_interval": 2, "save_every_steps": 3} | config
    val = data(16) if validation else None
    return Trainer(Noisy(), data(), val, config=settings, output_dir=folder, callbacks=callbacks, progress=False)


def weights(trainer):
    return torch.cat([param.detach().flatten() for param in trainer.model.parameters()])


@pytest.fixture(scope="module")
def undisturbed():
    trainer = make()
    trainer.train()
    return weights(trainer)


def test_hooks_outside_a_step_do_not_change_the_training(undisturbed, tmp_path):
    callback = DrawingEverywhere()
    trainer = make(folder=tmp_path / "run", callbacks=[callback])
    trainer.train()
    assert {
        "on_train_begin",
        "on_epoch_begin",
        "on_checkpoint",
        "on_log",
        "on_validation_end",
    } <= callback.drawn.keys()
    assert torch.equal(weights(trainer), undisturbed)


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_resumed_run_draws_in_its_hooks_what_the_undisturbed_one_draws(undisturbed, tmp_path, stop):
    folder, whole = tmp_path / "run", DrawingEverywhere(["on_train_begin", "on_epoch_begin"])
    make(callbacks=[whole]).train()
    make(folder=folder, callbacks=[DrawingEverywhere()], max_steps=stop).train()
    callback = DrawingEverywhere(["on_train_begin", "on_epoch_begin"])
    trainer = make(folder=folder, callbacks=[callback])
    trainer.load_checkpoint(folder)
    draw()
    torch.manual_seed(99)
    trainer.train()
    assert torch.equal(weights(trainer), undisturbed)
    assert callback.drawn["on_train_begin"] == whole.drawn["on_train_begin"]
    assert callback.drawn["on_epoch_begin"] == whole.drawn["on_epoch_begin"][(stop - 1) // 5 :]


def test_validation_that_draws_does_not_change_the_training(undisturbed):
    for settings in ({"validation": False}, {"validate_every_steps": 2}):
        trainer = make(**settings)
        trainer.train()
        assert torch.equal(weights(trainer), undisturbed)


def test_evaluating_twice_gives_the_same_numbers():
    trainer = make()
    first = trainer.evaluate()
    draw()
    assert trainer.evaluate() == first


def test_two_runs_in_turns_are_as_if_each_were_alone(undisturbed):
    alone = make(seed=5)
    alone.train()
    first, second = make(), make(seed=5)
    for epochs in (1, 2, 3):
        first.train(num_epochs=epochs)
        second.train(num_epochs=epochs)
    # One path run twice, but the plan of each call is another: the schedule of these runs is constant.
    assert torch.equal(weights(first), undisturbed)
    assert torch.equal(weights(second), weights(alone))


def test_a_checkpoint_saved_between_two_calls_holds_the_runs_own_numbers(undisturbed, tmp_path):
    trainer = make(folder=tmp_path / "run", max_steps=4)
    trainer.train()
    draw()
    path = trainer.save_checkpoint()
    resumed = make()
    resumed.load_checkpoint(path)
    resumed.train()
    assert torch.equal(weights(resumed), undisturbed)


def test_training_leaves_the_programs_generators_as_they_were():
    set_seed(4)
    expected = draw()
    trainer = make(callbacks=[DrawingEverywhere()])
    set_seed(4)
    trainer.train()
    trainer.evaluate()
    assert draw() == expected


def test_aside_and_running_give_generators_back_after_an_error():
    set_seed(1)
    expected = draw()
    for block in (lambda: aside(3), RunRandom(2).running):
        set_seed(1)
        with pytest.raises(ZeroDivisionError), block():
            _ = draw()[0] / 0
        assert draw() == expected


def test_a_running_run_tells_the_state_of_this_moment():
    run = RunRandom(2)
    with run.running():
        draw()
        state = run.state()
        expected = draw()
        run.load(state)
        assert draw() == expected
    with aside(0):
        run.load(state)
        with run.running():
            assert draw() == expected
    assert set(rng_state()) == set(state)


def test_drawing_aside_seeds_no_more_than_it_restores(monkeypatch):
    """torch.manual_seed would seed every device, also those that somebody else draws from."""
    seeded = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    with aside(3):
        draw()
    assert seeded == []


def test_a_probe_puts_back_every_generator():
    class Drawing(nn.Linear):
        def forward(self, x):
            draw()
            return super().forward(x)

    model = Drawing(2, 2)
    set_seed(5)
    expected = draw()
    set_seed(5)
    with probing(model, training=True):
        model(torch.ones(1, 2))
    assert draw() == expected


def test_numbers_cost_nothing_where_no_callback_gives_any():
    callbacks = CallbackList([StopsWithWords()])
    callbacks.around = lambda _: pytest.fail("nobody is called")
    assert callbacks.numbers() == {}


class StopsWithWords(Callback):
    def on_step_end(self, report):
        self.control.request_stop("signal-to-noise ratio too low")


def test_a_callbacks_reason_is_not_taken_for_a_signal():
    data = torch.randn(8, 2), torch.randint(0, 2, (8,))
    one = Trainer(nn.Linear(2, 2), data, config={"epochs": 1}, callbacks=[StopsWithWords()], progress=False)
    assert "interrupted" not in one.train()
    assert not one.was_interrupted
