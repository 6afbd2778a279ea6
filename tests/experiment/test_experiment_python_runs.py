"""Runs made in Python: evaluated and resumed by commands, if what they are made of has a name in a module."""

import importlib
import sys

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

import etude as library
from etude.callbacks import Callback
from etude.distributed import World
from etude.experiment.python_run import python_run
from etude.monitor import RunFolder
from run_files import records, weights

MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from etude.callbacks import Callback

print("imported", flush=True)

class Net(nn.Module):
    def __init__(self, width=8, act=nn.ReLU):
        super().__init__()
        self.width, self.act = width, act
        self.layers = nn.Sequential(nn.Linear(4, width), act(), nn.Dropout(0.2), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)

class Points(Dataset):
    def __init__(self, size, seed=0):
        self.size, self.seed = size, seed
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.x[index], self.y[index]

class Count(Callback):
    def __init__(self, *, every):
        super().__init__()
        self.steps, self.each = 0, every

    def on_step_end(self, report):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.stack(y)

def falling(step):
    return 1 / (1 + step / 10)

held_out = Points(24, seed=1)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch, capsys):
    """A module of a user, imported as their script does."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "my_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("my_parts")
    capsys.readouterr()
    yield module
    sys.modules.pop("my_parts", None)


def trainer(mine, folder, epochs=4, **changes):
    torch.manual_seed(0)
    model = mine.Net(6, act=nn.Tanh)
    parts = {
        "train_loader": DataLoader(mine.Points(40), batch_size=8, shuffle=True, collate_fn=mine.collate),
        "val_loader": mine.held_out,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "scheduler": mine.falling,
        "loss": nn.CrossEntropyLoss(label_smoothing=0.1),
        "metrics": ["f1", {"name": "accuracy", "k": 2}],
        "callbacks": [mine.Count(every=3), library.EarlyStopping(patience=50)],
        "config": {"epochs": epochs, "batch_size": 8, "device": "cpu", "log_interval": 2},
        **changes,
    }
    return library.Trainer(model, output_dir=folder, progress=False, **parts)


def forget():
    """Be another process, which has not imported the module."""
    sys.modules.pop("my_parts", None)


def test_a_resumed_run_is_the_one_that_was_not_stopped(mine, etude, tmp_path):
    trainer(mine, tmp_path / "whole").train()
    trainer(mine, tmp_path / "parts", epochs=2).train()
    forget()
    outcome = etude("resume", "parts", "training.epochs=4", "--import-class", "-q")
    assert outcome.code == 0, outcome.err
    assert "running the module my_parts" in outcome.err
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert sys.modules["my_parts"] is not mine


def test_a_run_is_resumed_with_another_learning_rate(mine, etude, tmp_path):
    trainer(mine, tmp_path / "run", epochs=2, optimizer=None, scheduler=None).train()
    forget()
    assert etude("resume", "run", "training.epochs=3", "training.learning_rate=0.5", "--import-class", "-q").code == 0
    assert [record["lr"] for record in records(tmp_path / "run", "epoch")] == [3e-4, 3e-4, 0.5]


def test_a_run_is_evaluated_like_its_last_validation(mine, etude, tmp_path):
    result = trainer(mine, tmp_path / "run").train()
    forget()
    outcome = etude("evaluate", "run", "--weights", "last", "--import-class")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert any(line.endswith("on the validation split:") for line in lines)
    shown = {name: float(value) for name, value in (line.split()[:2] for line in lines if line.startswith("  "))}
    assert {"loss", "f1"} < shown.keys()
    for name, value in shown.items():
        assert value == pytest.approx(result[f"val_{name}"], rel=1e-4), name
    train = etude("evaluate", "run", "--split", "train", "--import-class")
    assert "on the train split" in train.out
    assert "no data of a split 'test'" in etude("evaluate", "run", "--split", "test", "--import-class").error


@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_nothing_is_imported_without_the_switch(mine, etude, tmp_path, command):
    trainer(mine, tmp_path / "run", epochs=1).train()
    forget()
    outcome = etude(command, "run")
    assert "code of my_parts" in outcome.error
    assert "--import-class" in outcome.error
    assert "my_parts" not in sys.modules
    assert outcome.out == ""


def test_a_recipe_that_calls_something_else_runs_nothing_without_the_switch(mine, etude, tmp_path):
    trainer(mine, tmp_path / "run", epochs=1).train()
    config = tmp_path / "run/config.yaml"
    first, rest = config.read_text().split("\n", 1)
    data = yaml.safe_load(rest)
    data["python"]["loss"] = {"class": "os:mkdir", "arguments": {"path": "made"}}
    config.write_text(f"{first}\n{yaml.safe_dump(data)}")
    assert "code of" in etude("evaluate", "run").error
    assert "os:mkdir is not a class" in etude("evaluate", "run", "--import-class").error
    assert not (tmp_path / "made").exists()


class Local(Callback):
    """A callback that a test makes with something that has no name."""

    def __init__(self, thing):
        super().__init__()
        self.thing = thing


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"train_loader": (torch.zeros(16, 4), torch.zeros(16, dtype=torch.long))}, "train_loader (a Tensor"),
        ({"scheduler": lambda step: 1.0}, "scheduler ("),
        ({"callbacks": [Local(torch.zeros(2))]}, "callbacks (Local: thing"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}, "optimizer ("),
    ],
    ids=["tensors", "lambda", "callback", "optimizer"],
)
def test_what_is_missing_is_one_line(mine, etude, tmp_path, changes, missing):
    trainer(mine, tmp_path / "run", epochs=1, **changes).train()
    assert f"not recorded: {missing}" in etude("resume", "run", "training.epochs=2", "--import-class").error
    assert etude("evaluate", "run", "--import-class").code == 0  # which needs none of these


def test_a_model_of_the_script_is_missing(mine, etude, tmp_path):
    class Inside(nn.Linear):
        pass

    torch.manual_seed(0)
    data = mine.held_out
    library.Trainer(
        Inside(4, 3), data, data, config={"epochs": 1, "device": "cpu"}, output_dir="run", progress=False
    ).train()
    error = etude("evaluate", "run", "--import-class").error
    assert "model (a " in error
    assert "Inside" in error


def test_other_mistakes(mine, etude, tmp_path):
    trainer(mine, tmp_path / "run", epochs=1).train()
    assert "is finished" in etude("resume", "run", "--import-class").error
    assert "optimizer.lr" in etude("resume", "run", "optimizer.lr=1", "--import-class").error
    assert "epochz" in etude("resume", "run", "training.epochz=1", "--import-class").error
    (tmp_path / "home/my_parts.py").unlink()
    forget()
    outcome = etude("evaluate", "run", "--import-class")
    assert (outcome.code, len(outcome.errors)) == (2, 2)  # what it tries to run, and why it cannot
    assert "my_parts" in outcome.errors[-1]


def test_the_switch_is_refused_where_it_has_no_effect(etude, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("model: {name: mlp}\n")
    for command in ("resume", "evaluate"):
        assert "remove it" in etude(command, "run", "--import-class").error


def test_a_run_without_checkpoints_is_started_by_its_script(mine, etude, tmp_path):
    config = {"epochs": 1, "batch_size": 8, "device": "cpu", "save_checkpoints": False}
    trainer(mine, tmp_path / "run", config=config).train()
    assert "no checkpoint yet" in etude("resume", "run", "training.epochs=2", "--import-class").error


def test_config_of_a_python_run_names_its_parts(mine, tmp_path):
    trainer(mine, tmp_path / "run", epochs=1).train()
    recipe = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["python"]
    assert recipe["model"] == {
        "class": "my_parts:Net",
        "arguments": {"width": 6, "act": {"named": "torch.nn.modules.activation:Tanh"}},
    }
    assert recipe["val_loader"] == {"named": "my_parts:held_out"}
    assert recipe["train_loader"]["arguments"]["dataset"] == {
        "class": "my_parts:Points",
        "arguments": {"size": 40, "seed": 0},
    }
    assert recipe["callbacks"][0] == {"class": "my_parts:Count", "arguments": {"every": 3}}
    assert recipe["optimizer"]["arguments"]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        ([], {"data": 1, "shard": "all"}),
        (["parallel.shard=1", "parallel.data=2"], {"data": 2, "shard": 1}),
        (["parallel=ddp"], "ddp"),
    ],
)
def test_several_processes_divide_the_model_as_the_script_did(mine, tmp_path, monkeypatch, overrides, layout):
    trainer(mine, tmp_path / "run", parallel="fsdp").train()
    with monkeypatch.context() as patch:
        patch.setattr("etude.experiment.python_run.Trainer", lambda **parts: parts)
        run = python_run(RunFolder(tmp_path / "run"), overrides, import_class=True)
        assert run.trainer(World(size=2), progress=False)["parallel"] == layout
        assert "parallel" not in run.trainer(World(), progress=False)
