"""From a run folder back to its model: the right weights, in eval mode, without the data."""

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import etude
from etude import LeNet5, TensorData, Trainer, load_model
from etude.checkpoint import CheckpointManager
from etude.core import CheckpointError, ConfigError, RunFolderError
from etude.experiment import train_experiment

X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


class Kept(nn.Module):
    def __init__(self, width, activation="relu"):
        super().__init__()
        self.width, self.activation = width, activation
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class Unknown(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layer = nn.Linear(*sizes)

    def forward(self, x):
        return self.layer(x)


def train(folder, model, data=(X, Y), **config):
    settings = {"epochs": 3, "batch_size": 8, "device": "cpu", **config}
    trainer = Trainer(model, data, data, config=settings, output_dir=folder, progress=False)
    trainer.train()
    return trainer


def same(one, other):
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


def test_a_run_made_in_python(tmp_path):
    trainer = train(tmp_path / "run", Kept(5, "gelu"), keep_best=3)
    random = torch.get_rng_state()
    last = load_model(tmp_path / "run", "last")
    assert torch.equal(random, torch.get_rng_state())
    assert same(last, trainer.model)
    assert last.activation == "gelu"
    assert not any(module.training for module in last.modules())
    torch.testing.assert_close(etude.predict(last, X), trainer.predict(X))


def test_which_weights(tmp_path):
    train(tmp_path / "run", Kept(5), keep_best=5)
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    for entry in manager.all():
        found = load_model(tmp_path / "run", entry.step)
        saved = manager.load(f"step-{entry.step:08d}").model_state
        assert all(torch.equal(value, saved[name]) for name, value in found.state_dict().items())
    best = manager.load("best").model_state
    assert all(torch.equal(value, best[name]) for name, value in load_model(tmp_path / "run").state_dict().items())
    with pytest.raises(CheckpointError, match="77"):
        load_model(tmp_path / "run", 77)


def test_the_last_weights_where_nothing_is_the_best(tmp_path):
    trainer = Trainer(
        Kept(5), (X, Y), config={"epochs": 1, "device": "cpu"}, output_dir=tmp_path / "run", progress=False
    )
    trainer.train()
    assert same(load_model(tmp_path / "run"), trainer.model)


def test_a_model_whose_arguments_are_unknown_is_passed(tmp_path):
    trainer = train(tmp_path / "run", Unknown((4, 3)))
    with pytest.raises(ConfigError, match="model="):
        load_model(tmp_path / "run")
    mine = Unknown((4, 3)).train()
    assert load_model(tmp_path / "run", "last", model=mine) is mine
    assert same(mine, trainer.model)
    assert not mine.training
    with pytest.raises(CheckpointError, match="weight"):
        load_model(tmp_path / "run", model=Unknown((4, 2)))


def test_a_model_of_the_library(tmp_path):
    images = torch.rand(12, 3, 32, 32), torch.arange(12) % 4
    trainer = train(tmp_path / "run", LeNet5(4, (3, 32, 32)), images, epochs=1)
    assert same(load_model(tmp_path / "run", "last"), trainer.model)


def test_tied_weights_stay_tied(tmp_path):
    model = etude.CausalTransformerLM(13, d_model=8, n_layers=1, n_heads=2)
    train(tmp_path / "run", model, TensorData({"input_ids": torch.arange(120).view(12, 10) % 13}), epochs=1)
    found = load_model(tmp_path / "run", "last")
    assert found.head.weight is found.embedding.weight
    assert same(found, model)


def test_a_run_of_a_config_needs_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=X.numpy(), y=Y.numpy())
    config = {
        "model": {"name": "mlp", "hidden": [8], "dropout": 0.2},
        "data": {"name": "arrays", "path": "d.npz"},
        "training": {"epochs": 2, "batch_size": 8, "device": "cpu"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    train_experiment("c.yaml", run_dir="run", progress=False)
    (tmp_path / "d.npz").unlink()
    found = load_model("run", "last")
    saved = CheckpointManager(tmp_path / "run" / "checkpoints").load("last").model_state
    assert found.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in found.state_dict().items())
    assert found(torch.zeros(2, 4)).shape == (2, 3)


def test_several_tasks(load, tmp_path):
    outcome = train_experiment(load("training.epochs=1", curriculum=None), run_dir="run", progress=False)
    found = load_model(outcome.run_dir, "last")
    saved = CheckpointManager(tmp_path / "run" / "checkpoints").load("last").model_state
    assert found.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in found.state_dict().items())


def test_folders_without_a_run(tmp_path):
    with pytest.raises(RunFolderError, match="nowhere"):
        load_model(tmp_path / "nowhere")
