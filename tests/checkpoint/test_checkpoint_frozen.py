"""Checkpoints of models that are mostly frozen: small, exact, and refused for another base model."""

import shutil

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.checkpoint import read_checkpoint
from etude.core import CheckpointError
from etude.core.run_layout import FROZEN

DATA = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


class Adapted(nn.Module):
    """A frozen base, whose statistics change, and a small adapter."""

    def __init__(self, seed=0, base_seed=0):
        super().__init__()
        torch.manual_seed(base_seed)
        self.base = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 16))
        self.base.requires_grad_(False)
        torch.manual_seed(seed)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 3)

    def forward(self, x):
        return self.up(self.down(self.base(x)))


def run(epochs, folder, only=None, *, resume=False, model=None, **settings):
    config = {"epochs": epochs, "batch_size": 8, "device": "cpu", "trainable_only": only, "keep_best": 0, **settings}
    model = Adapted() if model is None else model
    trainer = Trainer(model, DATA, config=config, progress=False, output_dir=folder, resume=resume)
    trainer.train()
    return trainer


def weights(folder):
    return (folder / "checkpoints" / "last" / "model.safetensors").stat().st_size


def saved(folder):
    return read_checkpoint(folder / "checkpoints" / "last").model_state


@pytest.mark.parametrize("only", [None, True, False])
def test_resumed_run_is_the_uninterrupted_one(only, tmp_path):
    whole = run(3, tmp_path / "whole", only)
    run(1, tmp_path / "cut", only)
    resumed = run(3, tmp_path / "cut", only, resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert (tmp_path / "cut" / "checkpoints" / FROZEN).exists() == (only is None)


def test_checkpoints_hold_what_is_trained_and_buffers(tmp_path):
    sizes = {
        only: (run(1, tmp_path / str(only), only), weights(tmp_path / str(only)))[1] for only in (None, True, False)
    }
    model = Adapted()
    trained = sum(p.nbytes for p in (*model.up.parameters(), *model.down.parameters(), *model.buffers()))
    frozen = sum(p.nbytes for p in model.base.parameters())
    assert sizes[None] == sizes[True] < trained + 1500  # and a header
    assert sizes[False] >= trained + frozen
    assert (tmp_path / "None" / "checkpoints" / FROZEN).stat().st_size < frozen + 1500


def test_by_default_only_if_most_is_frozen(tmp_path):
    model = Adapted()
    model.base[:2].requires_grad_(True)
    run(1, tmp_path, model=model)
    assert not (tmp_path / "checkpoints" / FROZEN).exists()
    assert all(isinstance(value, torch.Tensor) for value in saved(tmp_path).values())


def test_another_base_model_is_refused_where_the_base_is_not_saved(tmp_path):
    run(1, tmp_path, True)
    with pytest.raises(CheckpointError, match=r"base\.0\.weight"):
        run(2, tmp_path, True, resume=True, model=Adapted(base_seed=1))


@pytest.mark.parametrize("change", ["other base", "file removed"])
def test_base_that_was_saved_once_is_restored(change, tmp_path):
    first = run(1, tmp_path)
    if change == "other base":
        resumed = run(2, tmp_path, resume=True, model=Adapted(base_seed=1))
    else:
        (tmp_path / "checkpoints" / FROZEN).unlink()
        resumed = run(2, tmp_path, resume=True)
    whole = run(2, tmp_path / "whole")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert torch.equal(first.model.base[0].weight, resumed.model.base[0].weight)


def test_damage_of_the_saved_base_is_noticed(tmp_path):
    run(1, tmp_path)
    path = tmp_path / "checkpoints" / FROZEN
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    damaged = [name for name, value in saved(tmp_path).items() if not isinstance(value, torch.Tensor)]
    assert len(damaged) == 1  # its fingerprint, which the model itself must have
    run(2, tmp_path, resume=True)


def test_a_checkpoint_that_was_moved_alone_needs_the_base(tmp_path):
    first = run(1, tmp_path / "run")
    shutil.copytree((tmp_path / "run" / "checkpoints" / "last").resolve(), tmp_path / "elsewhere")
    other = Trainer(Adapted(seed=5), DATA, config={"device": "cpu"}, progress=False)
    other.load_checkpoint(tmp_path / "elsewhere")
    assert torch.equal(other.model.up.weight, first.model.up.weight)
    with pytest.raises(CheckpointError, match=r"base\.0\.weight"):
        Trainer(Adapted(base_seed=1), DATA, progress=False).load_checkpoint(tmp_path / "elsewhere")


def test_a_frozen_parameter_that_changes_is_saved_itself(tmp_path):
    class Change(Callback):
        def on_train_begin(self, run):
            self.model = run.model

        def on_epoch_end(self, epoch, logs):
            if epoch == 1:
                with torch.no_grad():
                    self.model.base[3].bias.add_(1.0)

    config = {"epochs": 3, "batch_size": 8, "device": "cpu"}
    trainer = Trainer(Adapted(), DATA, config=config, callbacks=Change(), progress=False, output_dir=tmp_path)
    trainer.train()
    assert torch.equal(saved(tmp_path)["base.3.bias"], trainer.model.base[3].bias)


def test_overwriting_a_run_replaces_its_base(tmp_path):
    run(1, tmp_path)
    model = Adapted(base_seed=3)
    trainer = Trainer(
        model, DATA, config={"epochs": 1, "device": "cpu"}, progress=False, output_dir=tmp_path, overwrite=True
    )
    trainer.train()
    assert torch.equal(saved(tmp_path)["base.0.weight"], model.base[0].weight)
    assert weights(tmp_path) < model.base[0].weight.nbytes


def test_parameters_that_training_freezes_count_too(tmp_path):
    model = Adapted()
    model.requires_grad_(True)
    run(1, tmp_path, True, model=model, freeze="base")
    marks = {name for name, value in saved(tmp_path).items() if not isinstance(value, torch.Tensor)}
    assert marks == {f"base.{name}" for name, _ in model.base.named_parameters()}
