"""Several tasks through a whole trainer: what its loop has to tell the step, and the order of the numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from etude import DataLoader, Trainer
from etude.core import ConfigError, DataError, TrainingError
from etude.data import StreamLoader
from etude.engine.callback import Callback
from etude.metrics import F1, Accuracy, ConfusionMatrix
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskGradientWatcher, TaskSpec
from etude.multitask.weighting import DynamicWeightAverage, PCGrad

TASKS = ("zeta", "alpha", "mid")
SAMPLES, BATCH = 24, 8


def make(weighting, missing=()):
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4)
    data = {"input": x, **{task: (x[:, :1] * (place + 1)).cos() for place, task in enumerate(TASKS)}}
    heads = {task: LinearHead(1, in_features=6) for task in TASKS}
    specs = {task: TaskSpec(task, nn.MSELoss(), labels=task) for task in TASKS}
    model = MultiTaskModel(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), heads)
    loader = DataLoader({key: value for key, value in data.items() if key not in missing}, batch_size=BATCH)
    return model, MultiTask(specs, weighting), loader


class Epochs(Callback):
    """Keeps the numbers of every epoch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs):
        self.logs.append(dict(logs))


class Looks(TaskGradientWatcher):
    """Asks for the tasks' gradients at every third step."""

    def __init__(self):
        super().__init__()
        self.asked, self.seen = [], []

    def wants_task_gradients(self, step):
        self.asked.append(step)
        return step % 3 == 0

    def on_task_gradients(self, gradients):
        self.seen.append(gradients.step)


def test_the_weights_of_an_epoch_follow_from_the_losses_of_the_two_before():
    model, task, loader = make(DynamicWeightAverage(TASKS))
    epochs = Epochs()
    Trainer(model, loader, task=task, config={"epochs": 4}, callbacks=[epochs], progress=False).train()
    losses = [[logs[f"{name}/loss"] for name in TASKS] for logs in epochs.logs]
    for place, logs in enumerate(epochs.logs):
        # The weights reported at the end of an epoch are those of the next one.
        ratios = (
            [new / old for new, old in zip(losses[place], losses[place - 1], strict=True)] if place else [1.0] * 3
        )
        shares = [math.exp(ratio / 2.0) for ratio in ratios]
        expected = [3 * share / sum(shares) for share in shares]
        assert [logs[f"{name}/weight"] for name in TASKS] == pytest.approx(expected, rel=1e-5)
    assert len({logs["zeta/weight"] for logs in epochs.logs}) == 4


def test_a_task_without_labels_in_an_epoch_keeps_what_is_known_of_it(caplog):
    weighting = DynamicWeightAverage(TASKS)
    model, task, loader = make(weighting)
    Trainer(model, loader, task=task, config={"epochs": 2}, progress=False).train()
    last, before = weighting.last.clone(), weighting.before.clone()
    _, _, without = make(None, missing=("alpha",))
    batches = [*without]  # a list may hold batches of any kind, so that the first one does not tell
    Trainer(model, batches, task=task, config={"epochs": 1}, progress=False).train()
    assert weighting.last[1] == last[1]
    assert weighting.before[1] == before[1]
    assert weighting.before[0] == last[0]
    assert "the task 'alpha' had no labels in a whole epoch" in caplog.text


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["memory", "dataset", "torch", "streams", "named stream", "variant", "later"])
def test_labels_that_no_batch_has_are_found_in_the_first_one(kind, accumulation):
    """With the key, the keys that there are and the nearest of them; before anything is learned."""
    model, task, given = make(None)
    data = given.data
    stream = "whole" if kind == "named stream" else None
    specs = {name: replace(spec, stream=stream) for name, spec in task.tasks.items()}
    wrong = replace(specs["alpha"], labels="alhpa")
    specs["alpha"] = replace(specs["alpha"], variants={"x": wrong}) if kind == "variant" else wrong
    task = MultiTask(specs)
    if kind == "later":  # a phase to come brings it in
        task.activate({"zeta": 1.0})
    rows = [{name: column[row] for name, column in data.items()} for row in range(24)]
    loader = {
        "dataset": lambda: DataLoader(rows, batch_size=4),
        "torch": lambda: torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True),
        "streams": lambda: StreamLoader({"whole": data, "bare": {"input": data["input"]}}, 4),
        "named stream": lambda: StreamLoader({"whole": data}, 4),
    }.get(kind, lambda: DataLoader(data, batch_size=4))()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(TrainingError, match=r"'alpha' .*'alhpa'.*did you mean 'alpha'\?.*input, .*zeta") as caught:
        Trainer(model, loader, task=task, config={"grad_accum_steps": accumulation}, progress=False).train()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_labels_by_name_need_batches_with_names():
    model, task, given = make(None)
    labels = {name: column for name, column in given.data.items() if name != "input"}
    rows = [(given.data["input"][row], {name: column[row] for name, column in labels.items()}) for row in range(24)]
    with pytest.raises(TrainingError, match=r"task '\w+' are '\w+', which no batch has"):
        Trainer(model, DataLoader(rows, batch_size=4), task=task, progress=False).train()


@pytest.mark.parametrize("metric", [ConfusionMatrix(4), F1(num_labels=2), F1(num_classes=4), Accuracy()])
def test_a_metric_that_does_not_fit_is_found_in_the_first_batch(metric):
    """Not in the first validation, after an epoch; it names what is missing."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    spec = TaskSpec("kind", nn.CrossEntropyLoss(), labels="kind", metrics={"score": metric})
    model = MultiTaskModel(nn.Linear(4, 6), {"kind": LinearHead(3, in_features=6)})
    loader = DataLoader({"input": x, "kind": x[:, :3].argmax(1)}, batch_size=BATCH)
    trainer = Trainer(model, loader, loader, task=MultiTask({"kind": spec}), config={"epochs": 1}, progress=False)
    if isinstance(metric, Accuracy):
        numbers = trainer.train()
        assert numbers["val_kind/score"] == numbers["val_kind/accuracy"]  # the trial is not counted
        return
    with pytest.raises(DataError, match=r"task 'kind': .*num_(classes|labels)"):
        trainer.train()
    assert trainer.state.clock.step == 0


def test_callbacks_are_asked_for_every_step_by_its_number():
    model, task, loader = make(None)
    looks = Looks()
    Trainer(model, loader, task=task, config={"epochs": 3}, callbacks=[looks], progress=False).train()
    assert looks.seen == [0, 3, 6]
    assert sorted(set(looks.asked)) == list(range(9))


def test_pcgrad_meets_the_tasks_in_another_order_at_every_step(monkeypatch):
    steps = []
    order = PCGrad.order
    monkeypatch.setattr(PCGrad, "order", lambda self, step: steps.append(step) or order(self, step))
    model, task, loader = make(PCGrad(TASKS))
    Trainer(model, loader, task=task, config={"epochs": 2}, progress=False).train()
    assert steps == list(range(6))


def test_numbers_come_in_the_order_of_the_tasks():
    model, task, loader = make(None)
    trainer = Trainer(model, loader, loader, task=task, config={"epochs": 1}, progress=False)
    numbers = [name for name in trainer.evaluate() if name.endswith("/loss")]
    assert numbers == [f"{name}/loss" for name in TASKS]
    backwards = {"mid/loss": 1.0, "alpha/loss": 2.0, "loss": 3.0, "zeta/f1": 4.0, "zeta/loss": 5.0}
    assert list(task.ordered(backwards)) == ["loss", "zeta/f1", "zeta/loss", "alpha/loss", "mid/loss"]


def test_the_trial_of_the_first_batches_warns_of_no_task_that_comes_later(caplog):
    """Validation goes through one stream after the other: its first batches hold the tasks of the first one only."""
    model, task, given = make(None)
    specs = {name: replace(spec, stream=name) for name, spec in task.tasks.items()}
    streams = {name: {"input": given.data["input"], name: given.data[name]} for name in TASKS}
    loaders = StreamLoader(streams, BATCH), StreamLoader(streams, 2, training=False)
    Trainer(model, *loaders, task=MultiTask(specs), config={"epochs": 1}, progress=False).train()
    assert not caplog.records


class Plain(Callback):
    def on_task_gradients(self, gradients):
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "of_tasks", "fact"),
    [(Looks, False, "MultiTask"), (Plain, True, "on_task_gradients")],
)
def test_a_callback_that_would_see_no_gradients_of_tasks_is_refused(kind, of_tasks, fact):
    model, task, loader = make(None)
    model, given = (model, {"task": task}) if of_tasks else (nn.Linear(4, 1), {"loss": "mse"})
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*{fact}"):
        Trainer(model, loader, **given, callbacks=[kind()], progress=False)
