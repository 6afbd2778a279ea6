"""Every named optimizer in a Trainer: exact resume, accumulation, skipped updates, sections that are mistaken."""

import logging

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.config.registry import names
from etude.core import ConfigError, TrainingError

WRAPPERS = "lookahead", "sam", "several"
NAMES = [name for name in names("optimizer") if name not in WRAPPERS and not name.startswith("cli_")]
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(32) % 3


def trainer(optimizer, folder=None, *, data=(X, Y), model=None, callbacks=(), **settings):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    config = {"epochs": 2, "batch_size": 8, "seed": 3, "device": "cpu", **settings}
    return Trainer(
        model, data, config=config, optimizer=optimizer, output_dir=folder, progress=False, callbacks=callbacks
    )


def weights(made):
    return torch.cat([param.detach().flatten() for param in made.model.parameters()])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bytes(tmp_path, name):
    straight = trainer(name)
    straight.train()
    trainer(name, tmp_path, max_steps=3).train()
    later = trainer(name, tmp_path)
    later.load_checkpoint(tmp_path)
    later.train()
    assert torch.equal(weights(later), weights(straight))


@pytest.mark.parametrize("name", NAMES)
def test_accumulated_batches_are_one_batch(name):
    large, small = trainer(name, batch_size=16, max_steps=2), trainer(name, grad_accum_steps=2, max_steps=2)
    large.train(), small.train()
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-4, atol=1e-5)


class Steps(Callback):
    def __init__(self):
        super().__init__()
        self.skipped, self.weights = [], []

    def on_train_begin(self, run):
        self.model = run.model

    def on_step_end(self, report):
        self.skipped.append(float(report.skipped))
        self.weights.append(torch.cat([param.detach().flatten() for param in self.model.parameters()]))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_update_that_is_not_finite_changes_nothing(name, precision):
    bad, seen = X.clone(), Steps()
    bad[30] = float("nan")
    trainer(name, data=(bad, Y), callbacks=seen, epochs=1, precision=precision).train()
    place = seen.skipped.index(1.0)
    assert sum(seen.skipped) == 1
    assert place > 0
    assert torch.equal(seen.weights[place], seen.weights[place - 1])
    assert all(torch.isfinite(one).all() for one in seen.weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"lrr": 0.1}, "lrr"),
        ({"lr": -0.1}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"kernel": "triton"}, "kernel"),
    ],
)
def test_a_mistaken_section_is_one_line(name, section, words):
    with pytest.raises(ConfigError, match=words) as found:
        trainer({"name": name, **section})
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_training_are_those_of_the_optimizer(name):
    made = trainer(name, learning_rate=0.02, weight_decay=0.3)
    assert {group["lr"] for group in made.optimizer.param_groups} == {0.02}
    assert {group["weight_decay"] for group in made.optimizer.param_groups} == {0.3}


@pytest.mark.parametrize("name", ["lion", "adafactor", "schedule_free_adamw"])
def test_sparse_gradients_are_refused_with_a_remedy(name):
    table = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    made = trainer(name, model=table, data=(torch.randint(9, (32, 2)), Y))
    with pytest.raises(TrainingError, match="sparse=False"):
        made.train()


def test_a_run_says_which_parameters_muon_takes(caplog):
    with caplog.at_level(logging.INFO, "etude"):
        trainer("muon", max_steps=2).train()
    lines = [line for line in caplog.messages if "Muon updates" in line]
    assert len(lines) == 1
    assert "2 tensors (112 weights): 0.weight, 3.weight" in lines[0]
    assert "AdamW updates 6 tensors" in lines[0]
