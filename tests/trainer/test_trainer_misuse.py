"""Losses, tasks, schedules and callbacks that cannot work: one line that names them, and nothing hidden."""

import logging
import math
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etude import Callback, EarlyStopping, EtudeError, Trainer, training_step
from etude.core import ConfigError, DataError, TrainingError

x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))


def make_trainer(model=None, data=(x, y), val=None, **settings):
    config = {"epochs": 2, "batch_size": 8, "device": "cpu", **settings.pop("config", {})}
    return Trainer(model or make_model(), data, val, config=config, progress=False, **settings)


@pytest.mark.parametrize(
    "loss",
    [lambda out, labels: F.cross_entropy(out.detach(), labels), lambda out, labels: (out.argmax(1) != labels).sum()],
    ids=["detached", "argmax"],
)
def test_a_loss_without_gradient_is_explained(loss):
    with pytest.raises(TrainingError, match="does not depend on any parameter"):
        make_trainer(loss=loss).train()


@pytest.mark.parametrize("loss", [nn.CosineEmbeddingLoss(), nn.CTCLoss(), lambda out: out.sum()])
def test_a_loss_of_other_arguments_is_refused_at_once(loss):
    with pytest.raises(ConfigError, match=r"\(predictions, labels\)"):
        make_trainer(loss=loss)


def test_a_loss_of_other_arguments_is_named_by_a_single_step_too():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(DataError, match="loss GaussianNLLLoss"):
        training_step(model, nn.GaussianNLLLoss(), optimizer.step, optimizer.zero_grad, x, y)


@pytest.mark.parametrize("val", [None, (x, y)], ids=["training", "validation"])
@pytest.mark.parametrize("form", [lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: None])
def test_a_task_that_returns_no_terms_is_explained(form, val):
    def task(model, batch, *, metrics):
        return form(F.cross_entropy(model(batch[0]), batch[1]))

    with pytest.raises(TrainingError, match="LossTerm"):
        make_trainer(task=task, val=val).train()


@pytest.mark.parametrize("batch", [(x, x, y), (x, x, x, y)])
def test_batches_with_more_inputs_than_the_model_takes_are_explained(batch):
    with pytest.raises(DataError, match=r"Sequential.*positional arguments"):
        make_trainer(data=[batch]).train()


def test_a_wrong_call_inside_a_model_keeps_its_traceback():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, data):
            return self.layer(data, data)

    with pytest.raises(TypeError) as caught:
        make_trainer(Wrong()).train()
    assert not isinstance(caught.value, EtudeError)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.5, None, "1", torch.tensor(math.nan), torch.tensor(-0.5)])
def test_a_schedule_that_gives_no_factor_is_named_with_its_step(factor):
    before = make_trainer(scheduler=lambda step: 1.0, config={"max_steps": 4})
    before.train()
    trainer = make_trainer(scheduler=lambda step: 1.0 if step < 4 else factor)
    with pytest.raises(TrainingError, match="for step 4"):
        trainer.train()
    for mine, theirs in zip(trainer.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_factors_of_numpy_serve():
    assert make_trainer(scheduler=lambda step: np.float32(0.5)).train()["lr"] == pytest.approx(1.5e-4)


def test_frozen_weights_that_are_not_finite_are_named():
    model = make_model()
    model[0].weight.data[0, 0] = math.nan
    model[0].requires_grad_(False)
    with pytest.raises(TrainingError, match=r"weights themselves are not finite \(0.weight\)"):
        make_trainer(model).train()


@pytest.mark.parametrize("name", ["use_amp", "compile_model"])
def test_switches_are_true_or_false(name):
    with pytest.raises(ConfigError, match=name):
        make_trainer(**{name: "no"})


# ---------------------------------------------------------------------------------------------------- callbacks


class Fails(Callback):
    def on_step_end(self, report):
        raise ZeroDivisionError("in a step")


class FailsToo(Callback):
    def on_exception(self, error):
        raise KeyError("on_exception itself")


class Closes(Callback):
    closed = None

    def on_exception(self, error):
        self.closed = error


def test_a_callback_that_fails_on_an_error_neither_hides_it_nor_keeps_others_from_closing(caplog):
    closes = Closes()
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError, match="in a step"):
        make_trainer(callbacks=[Fails(), FailsToo(), closes]).train()
    assert isinstance(closes.closed, ZeroDivisionError)
    assert "on_exception itself" in caplog.text


class Interrupts(Callback):
    def on_step_begin(self, step):
        signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_stopped_in_its_first_epoch_does_not_miss_validation(caplog):
    result = make_trainer(val=(x, y), callbacks=[EarlyStopping(), Interrupts()]).train()
    assert result["interrupted"]
    assert "never reported" not in caplog.text
    make_trainer(callbacks=[EarlyStopping()]).train()
    assert "never reported" in caplog.text


class Draws(Callback):
    def state_dict(self):
        return {"drawn": float(torch.rand(()))}


def test_random_draws_in_the_state_of_a_callback_do_not_change_the_training(tmp_path):
    config = {"save_every_steps": 1}
    with_draws = make_trainer(callbacks=[Draws()], output_dir=tmp_path, config=config)
    plain = make_trainer()
    with_draws.train()
    plain.train()
    for mine, theirs in zip(with_draws.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("run", ["train", "evaluate"])
def test_a_model_that_cannot_be_compiled_is_one_line(run):
    from torch._inductor import config

    model = nn.Sequential(make_model(), nn.Tanh(), nn.Linear(2, 2))
    trainer = make_trainer(model, config={"compile": "model"})
    broken = config.patch({"cpp.cxx": (None, "/no/such/compiler"), "fx_graph_cache": False})
    with broken, pytest.raises(TrainingError, match=r"No working C\+\+ compiler.*training.compile=off"):
        trainer.train() if run == "train" else trainer.evaluate((x, y))
    torch.compiler.reset()
