"""ModelCheckpoint: the best epoch's weights, in a file that safetensors itself can read."""

import os

import pytest
import torch
from callback_life import Life
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from etude.callbacks import CallbackList, ModelCheckpoint
from etude.callbacks.model_checkpoint import save_weights
from etude.checkpoint import load_model_state
from etude.core import CheckpointError, ConfigError, TrainingError


def metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_keeps_the_weights_of_the_best_epoch(tmp_path):
    life = Life(tmp_path)
    callback = ModelCheckpoint("checkpoints/best_model.safetensors")
    life.whole(callback)
    path = tmp_path / "checkpoints" / "best_model.safetensors"
    assert callback.best_path == path
    weights = load_file(path)
    assert set(weights) == {"weight", "bias"}
    assert torch.equal(weights["weight"], torch.full((2, 3), 5.5))  # what the model was in epoch 5
    assert torch.equal(weights["bias"], life.model.bias)
    assert metadata(path) == {"format": "pt", "epoch": "5", "step": "24", "monitor": "val_loss", "value": "1.0"}


def test_max_mode_by_the_short_name(tmp_path):
    Life(tmp_path).whole(ModelCheckpoint("best.safetensors", monitor="val_acc", mode="max"))
    assert metadata(tmp_path / "best.safetensors")["epoch"] == "9"


@pytest.mark.parametrize("name", ["weights/", "weights"])
def test_a_folder_gets_a_file(tmp_path, name):
    Life(tmp_path).whole(ModelCheckpoint(name))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["best_model.safetensors"]


def test_fields_keep_one_file_per_improvement(tmp_path):
    Life(tmp_path).whole(ModelCheckpoint("w/{epoch:02d}-{val_loss:.2f}-{val_acc:.2f}.safetensors"))
    names = sorted(path.name for path in (tmp_path / "w").iterdir())
    assert names == ["00-1.50-0.00.safetensors", "04-1.10-0.20.safetensors", "05-1.00-0.25.safetensors"]


def test_a_folder_with_fields(tmp_path):
    Life(tmp_path, total_epochs=1).whole(ModelCheckpoint("w/{epoch}/"))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")] == [
        "w/0/best_model.safetensors"
    ]
    assert not (tmp_path / "w" / "{epoch}").exists()


def test_unknown_field_is_explained(tmp_path):
    with pytest.raises(
        TrainingError, match=r"cannot fill in filepath .*'f1'.*; its fields can be: epoch, .*val_loss"
    ):
        Life(tmp_path).whole(ModelCheckpoint("{f1}.safetensors"))


def test_other_suffixes_are_refused():
    with pytest.raises(ConfigError, match=r"'best\.pt' must end in \.safetensors, or in / if it is a folder"):
        ModelCheckpoint("best.pt")


class Tied(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4).t())  # not contiguous
        self.register_buffer("part", self.table[1:])  # a view of a part
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.int32))
        self.register_buffer("brief", torch.arange(3).to(torch.bfloat16))
        nn.init.constant_(self.head.weight, fill)


def test_tied_and_odd_tensors_come_back_and_ties_are_stored_once(tmp_path):
    path = tmp_path / "tied.safetensors"
    save_weights(Tied(7.0), path, {"epoch": "0"})
    assert "head.weight" not in load_file(path)
    assert metadata(path)["head.weight"] == "embedding.weight"
    other = Tied(0.0)
    other.brief.zero_()
    load_model_state(other, load_file(path))
    for name, value in Tied(7.0).state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert other.head.weight is other.embedding.weight


def test_safetensors_itself_loads_it(tmp_path):
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    first, second = tied(), tied()
    save_weights(first, tmp_path / "tied.safetensors", {})
    load_model(second, tmp_path / "tied.safetensors")  # strict: every weight is there
    assert torch.equal(second["head"].weight, first["head"].weight)


def test_names_are_those_of_the_users_module(tmp_path):
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    save_weights(compiled, tmp_path / "c.safetensors", {})
    assert set(load_file(tmp_path / "c.safetensors")) == {"0.weight", "0.bias"}


def test_equal_weights_give_equal_bytes(tmp_path):
    texts = set()
    for _ in range(5):
        save_weights(Tied(1.0), tmp_path / "w.safetensors", {str(i): "x" for i in range(9)})
        texts.add((tmp_path / "w.safetensors").read_bytes())
    assert len(texts) == 1


def test_full_disk_costs_the_file_and_not_the_run(tmp_path, monkeypatch, caplog):
    life = Life(tmp_path)
    callback = ModelCheckpoint("best.safetensors")
    callbacks = CallbackList([callback])
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    before = (tmp_path / "best.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for _ in range(4):
            life.epoch(callbacks)  # epoch 4 is better, but cannot be written
    assert "best.safetensors: No space left on device; training continues" in caplog.text
    assert (tmp_path / "best.safetensors").read_bytes() == before
    assert callback.monitored.best_epoch == 0
    assert [path.name for path in tmp_path.iterdir()] == ["best.safetensors"]
    life.epoch(callbacks)
    assert metadata(tmp_path / "best.safetensors")["epoch"] == "5"


def test_unwritable_folder_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"ModelCheckpoint cannot write in .*file: .*; choose a writable filepath"
    ):
        CallbackList([ModelCheckpoint("file/best.safetensors")]).on_train_begin(Life(tmp_path).run_info())


def test_by_hand_with_and_without_a_model(tmp_path, caplog):
    path = tmp_path / "by_hand.safetensors"
    callback = ModelCheckpoint(path)
    for epoch in range(3):
        callback.on_epoch_end(epoch, {"val_loss": 1.0 - epoch / 10})
    assert "saved nothing: call on_train_begin(run), or set its `.model`" in caplog.text
    assert not path.exists()
    callback.model = nn.Linear(2, 1)
    callback.on_epoch_end(3, {"val_loss": 0.1})
    assert torch.equal(load_file(path)["weight"], callback.model.weight)
