"""Freezing by name: which parameters change in which epoch, modes of modules, exact resuming, what is refused."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.callbacks import Freeze
from etude.core import ConfigError
from etude.engine.capture import Capture
from stub_recorder import RunAgain

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.top = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.top(self.body(x)).relu())


SETTINGS = {"freeze": ["body", "top.*"], "unfreeze": {1: "top", 2: ["body.1.*"]}}
BEGINS = {"head": 0, "top": 1, "body.1": 2, "body.0": 9}
"""The epoch from which parameters are trained."""


class Snapshots(Callback):
    def __init__(self):
        super().__init__()
        self.states, self.modes = [], []

    def on_train_begin(self, run):
        self.model = run.model

    def on_step_begin(self, step):
        self.modes.append({name: module.training for name, module in self.model.named_modules()})

    def on_epoch_begin(self, epoch):
        self.states.append({name: value.clone() for name, value in self.model.state_dict().items()})

    def on_train_end(self, result):
        self.on_epoch_begin(0)


def run(epochs, folder=None, *, resume=False, optimizer=None, **settings):
    torch.manual_seed(0)
    snapshots = Snapshots()
    config = {"epochs": epochs, "batch_size": 8, "device": "cpu", **SETTINGS, **settings}
    model = Net()
    trainer = Trainer(
        model,
        DATA,
        DATA,
        config=config,
        optimizer=optimizer and optimizer(model.parameters()),
        callbacks=[snapshots],
        progress=False,
        output_dir=folder,
        resume=resume,
    )
    return trainer, snapshots


@pytest.mark.parametrize(
    "optimizer", [None, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)]
)
def test_parameters_change_from_their_epoch_on(optimizer):
    trainer, snapshots = run(4, optimizer=optimizer)
    trainer.train()
    for epoch, (before, after) in enumerate(pairwise(snapshots.states)):
        for name, _ in trainer.model.named_parameters():
            begins = next(value for prefix, value in BEGINS.items() if name.startswith(prefix))
            assert torch.equal(before[name], after[name]) == (epoch < begins), (epoch, name)


def test_frozen_modules_are_in_eval_mode_and_keep_their_statistics():
    trainer, snapshots = run(4)
    trainer.train()
    for step, modes in enumerate(snapshots.modes):
        epoch = step // 3
        expected = {"": True, "head": True, "top": epoch >= 1, "body.1": epoch >= 2, "body.0": False}
        assert {name: modes[name] for name in expected} == expected, step
        assert modes["body"] == modes["body.2"] == (epoch >= 2)
    means = [state["body.1.running_mean"] for state in snapshots.states]
    assert [torch.equal(one, two) for one, two in pairwise(means)] == [True, True, False, False]


def test_a_second_run_says_that_parameters_are_still_frozen(capsys):
    model = Net()
    for settings in ({"freeze": "body"}, {}):
        Trainer(model, DATA, config={"max_steps": 1, "device": "cpu", "batch_size": 8, **settings}).train()
        assert "171 parameters, 99 of them trained" in capsys.readouterr().out


def test_modes_stay_if_asked_for():
    trainer, snapshots = run(1, frozen_eval=False)
    trainer.train()
    assert all(all(modes.values()) for modes in snapshots.modes)
    assert not torch.equal(*(state["body.1.running_mean"] for state in snapshots.states))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resumed_run_is_the_uninterrupted_one(stop, tmp_path):
    whole, _ = run(4)
    whole.train()
    run(stop, tmp_path)[0].train()
    resumed, _ = run(4, tmp_path, resume=True)
    resumed.train()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_recorded_steps_are_the_usual_ones():
    settings = {"batch_size": 4, "freeze": "body", "unfreeze": {2: "body"}}
    usual, recorded = (run(4, **settings)[0] for _ in range(2))
    for trainer in (usual, recorded):
        trainer.model.body[2].p = 0.0  # random numbers of the CPU cannot be recorded
    recorded.step.capture = Capture(recorded.step, RunAgain(recorded.step))
    usual.train(), recorded.train()
    assert recorded.step.capture.recorder.recorded >= 2
    for name, value in usual.model.state_dict().items():
        assert torch.allclose(value, recorded.model.state_dict()[name]), name


def test_what_is_never_trained_is_not_in_the_optimizer():
    trainer, _ = run(1)
    held = {id(param) for group in trainer.optimizer.param_groups for param in group["params"]}
    names = {name for name, param in trainer.model.named_parameters() if id(param) in held}
    assert names == {f"{module}.{kind}" for module in ("head", "top", "body.1") for kind in ("weight", "bias")}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"freeze": "bdoy.*", "unfreeze": None}, ["freeze", "'bdoy.*'", "'body'"]),
        ({"unfreeze": {1: "tpo"}}, ["unfreeze.1", "'tpo'", "'top'"]),
        ({"unfreeze": {1: "head"}}, ["unfreeze.1", "head", "frozen"]),
        ({"freeze": None}, ["unfreeze", "freeze"]),
        ({"freeze": "*", "unfreeze": {1: "*"}}, ["*", "nothing to train"]),
        ({"unfreeze": {0: "top"}}, ["unfreeze", "0"]),
        ({"freeze": None, "unfreeze": None, "frozen_eval": False}, ["frozen_eval"]),
    ],
)
def test_mistakes_are_one_line(settings, words):
    with pytest.raises(ConfigError) as caught:
        run(1, **settings)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([None], "freeze is None"),
        ([[]], r"freeze is \[\]"),
        ([""], "freeze is ''"),
        ([["body", 3]], r"freeze is \['body', 3\]"),
        ([{"body": 1}], "freeze is {'body': 1}"),
        (["body", ["body"]], r"unfreeze is \['body'\].*must map"),
        (["body", "body"], "unfreeze is 'body'.*must map"),
        (["body", {1: None}], r"unfreeze\.1 is None"),
        (["body", {1: [2]}], r"unfreeze\.1 is \[2\]"),
        (["body", {"a": "body", 1: "body"}], "unfreeze: 'a'"),
        (["body", {True: "body"}], "unfreeze: True"),
    ],
)
def test_wrong_types_in_python_are_one_line(arguments, words):
    with pytest.raises(ConfigError, match=words):
        Freeze(*arguments)


def test_as_a_callback_in_python():
    torch.manual_seed(0)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Trainer(model, DATA, config={"epochs": 1, "device": "cpu"}, callbacks=Freeze("body"), progress=False).train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"top.weight", "top.bias", "head.weight", "head.bias"}


def test_a_notice_names_the_epoch_once(caplog):
    with caplog.at_level("INFO", logger="etude"):
        run(4)[0].train()
    found = [record.message.split(":")[0] for record in caplog.records if "unfreeze" in record.message]
    assert found == ["unfreeze.1", "unfreeze.2"]


def test_an_epoch_that_the_run_does_not_have_is_a_warning(caplog):
    run(2)[0].train()
    assert [record.message.split(":")[0] for record in caplog.records] == ["unfreeze.2"]
