"""What users give a Trainer: what should simply work does, and every misuse is one line that names the argument."""

import re
import signal

import numpy as np
import pytest
import torch
from torch import nn

from etude import (
    BasicTrainingLoop,
    Callback,
    DataLoader,
    EarlyStopping,
    Trainer,
    TrainerConfig,
    TrainingLoop,
)
from etude.core import ConfigError, DataError, TrainingError
from etude.losses import ClassificationLoss
from etude.multitask import MultiTask, TaskSpec
from etude.multitask.curriculum import Phase
from etude.optim import SGD, AdamW, cosine

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def trained(**options):
    """Return the weights after a short training."""
    model = net()
    options = {"train_loader": (X, Y), "config": {"epochs": 2, "batch_size": 8, "device": "cpu"}, **options}
    if isinstance(options.get("optimizer"), list):  # made from the parameters of the model
        options["optimizer"] = options["optimizer"][0](model.parameters())
    if isinstance(options.get("scheduler"), type):
        options["optimizer"] = AdamW(model.parameters())
        options["scheduler"] = options["scheduler"](options["optimizer"], 2)
    Trainer(model, progress=False, **options).train()
    return model.weight.detach()


# ------------------------------------------------------------------------------------------------ what simply works

CONFIG = {"epochs": 2, "batch_size": 8, "device": "cpu", "learning_rate": 0.05}
SAME = [
    ({"optimizer": "adamw"}, {"optimizer": AdamW}),
    ({"optimizer": "sgd", "config": CONFIG}, {"optimizer": lambda params: SGD(params, lr=0.05)}),
    ({"optimizer": {"name": "sgd", "lr": 0.3}}, {"optimizer": lambda params: SGD(params, lr=0.3)}),
    ({"optimizer": {"name": "sgd", "learning_rate": 0.3}}, {"optimizer": lambda params: SGD(params, lr=0.3)}),
    ({"optimizer": torch.optim.Adagrad, "config": CONFIG}, {"optimizer": [lambda p: torch.optim.Adagrad(p, 0.05)]}),
    ({"scheduler": "cosine"}, {"scheduler": cosine(total_steps=6)}),
    ({"scheduler": {"name": "cosine", "min_lr_ratio": 0.5}}, {"scheduler": cosine(total_steps=6, min_lr_ratio=0.5)}),
    ({"scheduler": torch.optim.lr_scheduler.StepLR}, {"scheduler": lambda step: 0.1 ** (step // 2)}),
    ({"loss": "cross_entropy"}, {"loss": ClassificationLoss()}),
    ({"loss": {"name": "cross_entropy", "label_smoothing": 0.1}}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    ({"callbacks": None}, {}),
    ({"train_loader": (X.double().numpy(), Y.int().numpy())}, {}),
    ({"train_loader": (X.numpy(), Y)}, {}),
    ({"train_loader": (X.tolist(), Y.tolist())}, {}),
    ({"train_loader": (X.double().numpy()[::-1][::-1], Y.tolist())}, {}),
]


@pytest.mark.parametrize(("short", "long"), SAME)
def test_names_classes_and_arrays_stand_for_what_they_mean(short, long):
    torch.testing.assert_close(trained(**short), trained(**long))


def test_arrays_of_numpy_that_cannot_be_written_to():
    x, y = X.numpy().copy(), Y.numpy().copy()
    x.flags.writeable = y.flags.writeable = False
    torch.testing.assert_close(trained(train_loader=(x, y)), trained())


def test_arrays_of_numpy_take_the_format_of_the_model():
    one = Trainer(net().double(), (X.numpy(), Y.numpy()), config={"epochs": 1, "device": "cpu"}, progress=False)
    assert one.train()["loss"] > 0
    assert one.evaluate((X.numpy(), Y.numpy()))["loss"] > 0


@pytest.mark.parametrize(
    "callbacks",
    [
        EarlyStopping(monitor="loss", patience=1),
        "gradient_monitor",
        {"name": "early_stopping", "monitor": "loss"},
        ["gradient_monitor", EarlyStopping(monitor="loss"), {"name": "early_stopping", "monitor": "loss"}],
        (one for one in [EarlyStopping(monitor="loss")]),
    ],
    ids=["one", "name", "mapping", "list", "generator"],
)
def test_callbacks_single_or_named(callbacks):
    config = {"epochs": 1, "device": "cpu"}
    one = Trainer(net(), (X, Y), config=config, callbacks=callbacks, progress=False)
    assert len(one.callbacks) >= 1
    one.train()


def test_a_single_callback_through_the_other_doors():
    stop = EarlyStopping(monitor="loss")
    assert BasicTrainingLoop(net(), callbacks=stop, progress=False).callbacks == [stop]
    assert TrainingLoop(callbacks=stop).callbacks[0] is stop


# ------------------------------------------------------------------------------------------------ misuse


class Timm:
    """A scheduler with the interface of timm."""

    def step(self, epoch, metric=None): ...
    def step_update(self, num_updates, metric=None): ...


class NeedsClosure(torch.optim.SGD):
    def step(self, closure): ...


def tasks():
    return MultiTask({"a": TaskSpec("head")})


MISUSES = {
    "a model that is no module": ({"model": lambda x: x}, "model"),
    "no model": ({"model": None}, "model"),
    "a class of models": ({"model": nn.Linear}, "model"),
    "data by a name": ({"train_loader": "mnist"}, "train_loader"),
    "a number as data": ({"train_loader": 3}, "train_loader"),
    "a dict of loaders": ({"train_loader": {"train": [(X, Y)], "val": [(X, Y)]}}, "train_loader"),
    "no data to train on": ({"train_loader": None}, "train_loader"),
    "validation data by a name": ({"val_loader": "mnist"}, "val_loader"),
    "an array of text": ({"train_loader": (np.array(["a", "b"]), np.zeros(2))}, "train_loader"),
    "config by path": ({"config": "config.yaml"}, "config"),
    "config as a list": ({"config": [("epochs", 3)]}, "config"),
    "a class of configs": ({"config": TrainerConfig}, "config"),
    "unknown optimizer": ({"optimizer": "adamv"}, "optimizer"),
    "unknown argument of an optimizer": ({"optimizer": {"name": "adamw", "beta": 1}}, "optimizer"),
    "optimizer without a name": ({"optimizer": {"lr": 0.1}}, "optimizer"),
    "a number as optimizer": ({"optimizer": 0.1}, "optimizer"),
    "a class that is no optimizer": ({"optimizer": nn.Linear}, "optimizer"),
    "a function that makes no optimizer": ({"optimizer": lambda params: None}, "optimizer"),
    "a function without arguments": ({"optimizer": lambda: None}, "optimizer"),
    "LBFGS": ({"optimizer": [torch.optim.LBFGS]}, "optimizer"),
    "class LBFGS": ({"optimizer": torch.optim.LBFGS}, "optimizer"),
    "a closure": ({"optimizer": NeedsClosure}, "optimizer"),
    "parameters of another model": ({"optimizer": AdamW(nn.Linear(2, 2).parameters())}, "optimizer"),
    "unknown schedule": ({"scheduler": "cosinus"}, "scheduler"),
    "a number as scheduler": ({"scheduler": 3}, "scheduler"),
    "a class of schedulers": ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler"),
    "timm": ({"scheduler": Timm()}, "scheduler"),
    "unknown loss": ({"loss": "cross_entropi"}, "loss"),
    "a class of losses": ({"loss": nn.CrossEntropyLoss}, "loss"),
    "a number as loss": ({"loss": 3}, "loss"),
    "loss and task": ({"loss": nn.CrossEntropyLoss(), "task": tasks()}, "loss.*task"),
    "a class of tasks": ({"task": MultiTask}, "task"),
    "a task that cannot be called": ({"task": 3}, "task"),
    "a class of callbacks": ({"callbacks": [EarlyStopping]}, "callbacks"),
    "a class instead of callbacks": ({"callbacks": EarlyStopping}, "callbacks"),
    "a function as callback": ({"callbacks": [print]}, "callbacks"),
    "a number as callbacks": ({"callbacks": 3}, "callbacks"),
    "unknown callback": ({"callbacks": ["early_stoping"]}, "callbacks"),
    "None among callbacks": ({"callbacks": [None]}, "callbacks"),
    "curriculum without tasks": ({"curriculum": [Phase("a", 1, tasks=("a",))]}, "curriculum"),
    "a device that is none": ({"device": "gpu"}, "device"),
    "an object as device": ({"device": object()}, "device"),
    "a number as folder": ({"output_dir": 3}, "output_dir"),
    "a number as name": ({"name": 3}, "name"),
    "text as meta": ({"meta": "mine"}, "meta"),
    "a number as config": ({"whole_config": 3}, "whole_config.*3"),
    "epochs as text": ({"num_epochs": "3"}, "num_epochs"),
    "negative epochs": ({"num_epochs": -1}, "num_epochs"),
    "no epochs": ({"num_epochs": 0}, "num_epochs"),
    "half an epoch": ({"num_epochs": 2.5}, "num_epochs"),
    "true epochs": ({"num_epochs": True}, "num_epochs"),
    "float64 inputs": ({"train_loader": (X.double(), Y)}, "float64"),
    "float64 validation": ({"val_loader": (X.double(), Y)}, "float64"),
    "curriculum number": ({"curriculum": 3}, "curriculum.*Phase.*3"),
    "curriculum name": ({"curriculum": "default"}, "curriculum.*Phase.*default"),
    "task of two arguments": ({"task": lambda model, batch: {}}, "task.*metrics"),
    "loss as task": ({"task": nn.CrossEntropyLoss()}, "task.*metrics"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_one_line_that_names_the_argument(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    options, match = MISUSES[name]
    options = {"model": net(), "train_loader": (X, Y), "config": {"epochs": 1, "device": "cpu"}, **options}
    num_epochs, model = options.pop("num_epochs", None), options.pop("model")
    if isinstance(options.get("optimizer"), list):
        options["optimizer"] = options["optimizer"][0](model.parameters())
    with pytest.raises((ConfigError, DataError, TrainingError), match=match) as caught:
        Trainer(model, progress=False, **options).train(num_epochs)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_float64_is_explained_by_the_loops_too():
    loader = DataLoader(X.double(), Y, 8)
    with pytest.raises(DataError, match="float64"):
        TrainingLoop().train_epoch(model := net(), loader, AdamW(model.parameters()))
    with pytest.raises(DataError, match="float64"):
        Trainer(net(), device="cpu", progress=False).evaluate(loader)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_of_torchscript_is_refused():
    with pytest.raises(ConfigError, match="TorchScript"):
        Trainer(nn.Sequential(torch.jit.script(net())), (X, Y))


def test_train_inside_train_is_refused():
    class Again(Callback):
        def on_epoch_end(self, epoch, logs):
            one.train()

    one = Trainer(net(), (X, Y), config={"epochs": 1, "device": "cpu"}, callbacks=Again(), progress=False)
    with pytest.raises(TrainingError, match=r"train\(\)"):
        one.train()
    one.callbacks._hooks["on_epoch_end"].clear()
    assert one.train(2)["loss"] > 0  # and the trainer is free again


# ------------------------------------------------------------------------------------------------ results


def test_training_with_nothing_left_returns_the_last_numbers(tmp_path):
    options = {"config": {"epochs": 2, "device": "cpu"}, "progress": False}
    one = Trainer(net(), (X, Y), (X, Y), output_dir=tmp_path, **options)
    result = one.train()
    assert one.train() == result
    assert one.train(num_epochs=1) == result
    other = Trainer(net(), (X, Y), (X, Y), output_dir=tmp_path, resume=True, **options)
    assert other.train() == result  # and the checkpoint has kept its numbers
    bare = Trainer(net(), (X, Y), **options)
    assert bare.train() == bare.train()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_result_says_so(tmp_path, number):
    class Press(Callback):
        def on_step_end(self, report):
            if self.presses:
                signal.raise_signal(number)

    press = Press()
    press.presses = True
    options = {"config": {"epochs": 2, "batch_size": 8, "device": "cpu"}, "progress": False}
    one = Trainer(net(), (X, Y), callbacks=press, output_dir=tmp_path, **options)
    result = one.train()
    assert result["interrupted"] == 1.0
    assert one.was_interrupted
    assert one.callbacks.control.reason == number.name
    press.presses = False
    result = one.train()
    assert "interrupted" not in result
    assert not one.was_interrupted
    assert result["loss"] > 0


def test_a_run_stopped_by_a_callback_is_not_interrupted():
    class Stop(Callback):
        def on_step_end(self, report):
            self.control.request_stop("enough")

    one = Trainer(net(), (X, Y), config={"epochs": 2, "device": "cpu"}, callbacks=[Stop()], progress=False)
    assert "interrupted" not in one.train()


def test_whatever_gives_itself_as_an_array_is_data_for_training_validation_and_evaluation():
    class Table:
        def __init__(self, array):
            self.array = array

        def __len__(self):
            return len(self.array)

        def __array__(self, dtype=None, copy=None):
            return self.array

    table, labels = Table(X.double().numpy()), Table(Y.numpy())
    config = {"epochs": 1, "device": "cpu"}
    one = Trainer(net(), (table, labels), (table, labels), config=config, progress=False)
    other = Trainer(net(), (X, Y), (X, Y), config=config, progress=False)
    assert one.train()["val_loss"] == other.train()["val_loss"]
    assert one.evaluate((table, labels)) == other.evaluate((X, Y))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("epochs", "config={'epochs': …}"), ("learning_rate", "config={'learning_rate': …}"), ("epoch", "'epochs'")],
)
def test_a_setting_as_an_argument_is_explained(wrong, hint):
    with pytest.raises(TypeError, match=f"no argument '{wrong}'.*{re.escape(hint)}"):
        Trainer(nn.Linear(2, 2), (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), **{wrong: 3})
