"""Several tasks on several processes: each trains alone and then together, and compares."""

import os

import torch
from torch import nn

from etude import DataLoader, Trainer
from etude.config.registry import lookup
from etude.core.model import whole
from etude.data import StreamLoader, TensorData
from etude.distributed import World, leave_world
from etude.losses import ClassificationLoss, MultiLabelLoss
from etude.metrics import F1
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskGradientWatcher, TaskSpec

TASKS = ("kind", "flags", "size")


class Trunk(nn.Module):
    feature_dim = 6

    def __init__(self, most=99):
        super().__init__()
        self.most = most
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh())

    def features(self, x):
        if self.training and len(x) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        # An empty batch cannot be reshaped like this, nor by many models that people write.
        return self.layers(x).view(x.shape[0], -1)

    def forward(self, x):
        return self.features(x)


def part(samples, seed, keys=TASKS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    gone = torch.rand(samples, 5, generator=generator) < 0.4
    gone[1::2] = True  # so that one process may have no labels at all
    labels = {
        "kind": x[:, :3].argmax(1).masked_fill(gone[:, 0], -100),
        "flags": (x[:, :4] > 0.2).double().masked_fill(gone[:, 1:], float("nan")),
        "size": x[:, :2] * 3,
    }
    return TensorData({"input": x, **{key: labels[key] for key in keys}})


def loader(kind):
    if kind == "labels":  # the last batch of 4 has one sample: a process without any
        return DataLoader(part(17, 1).data, batch_size=4)
    streams = {"a": part(24, 2, ("kind", "flags")), "b": part(9, 3, ("size",))}
    if kind == "alternate":
        return StreamLoader(streams, 4, weights={"a": 1, "b": 1}, epoch_samples=24)
    return StreamLoader(streams, 6, weights={"a": 5, "b": 1}, draw="together", epoch_samples=24)  # one sample of b


class Looks(TaskGradientWatcher):
    def __init__(self):
        super().__init__()
        self.found = []

    def wants_task_gradients(self, step):
        return step % 3 == 0

    def on_task_gradients(self, gradients):
        self.found.append((gradients.tasks, gradients.products.tolist()))


def trained(kind, name, accumulate, rest, world=None, parallel=None, most=None):
    torch.manual_seed(0)
    weighting = None if name == "none" else lookup("weighting", name).factory(TASKS)
    heads = {task: LinearHead(size, in_features=6) for task, size in zip(TASKS, (3, 4, 2), strict=True)}
    model = MultiTaskModel(Trunk() if most is None else Trunk(most), heads)
    model.weighting = weighting
    model = model.double()
    streams = dict.fromkeys(TASKS) if kind == "labels" else {"kind": "a", "flags": "a", "size": "b"}
    metrics = {"kind": {"f1": F1(num_classes=3)}, "flags": {"f1": F1(num_labels=4)}, "size": {}}
    losses = {"kind": ClassificationLoss(), "flags": MultiLabelLoss(), "size": nn.MSELoss()}
    task = MultiTask(
        {t: TaskSpec(t, losses[t], stream=streams[t], labels=t, weight=0.5, metrics=metrics[t]) for t in TASKS},
        weighting,
    )
    if rest:  # one of the tasks rests, another is only watched
        task.activate({"kind": 1.0, "size": 0.0} if rest == "watch" else {"kind": 1.0, "size": 0.5})
    looks = Looks()
    validation = loader(kind)
    if kind != "labels":
        validation = StreamLoader(validation.data, 4, training=False)
    config = {"epochs": 2, "device": "cpu", "log_interval": 1, "grad_accum_steps": accumulate, "train_metrics": True}
    if most is not None:
        config["on_out_of_memory"] = "split"
    trainer = Trainer(
        model,
        loader(kind),
        validation,
        config=config,
        task=task,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
        callbacks=[looks] if parallel is None else [],
        progress=False,
        world=world,
        parallel=parallel,
    )
    return model, trainer.train(), looks.found


TIMING = {"samples_per_s", "data_wait", "epoch_s", "tokens_per_s", "mfu"}


def many_tasks() -> None:
    """Compare every case of the test, one after the other in the same processes."""
    for case in os.environ["TASKS_CASES"].split(";"):
        kind, name, accumulate, rest = case.split(",")
        try:
            compare(kind, name, int(accumulate), rest)
        except BaseException as error:
            error.add_note(f"of the case {case}")
            raise
    leave_world()


def compare(kind, name, accumulate, rest) -> None:
    """The model, the weighting's state, the numbers and the products of gradients do not depend on the processes."""
    alone, expected, looked = trained(kind, name, accumulate, rest, World())
    parallel = os.environ.get("TASKS_PARALLEL")
    most = 1 + int(os.environ["RANK"]) if "TASKS_SPLIT" in os.environ else None
    model, numbers, found = trained(kind, name, accumulate, rest, parallel=parallel, most=most)
    if parallel is not None:
        looked = []  # gradients of tasks are refused there
    for (key, value), theirs in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(
            whole(value), theirs, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert numbers.keys() == expected.keys(), numbers.keys() ^ expected.keys()
    for key in expected.keys() - TIMING:
        difference = abs(numbers[key] - expected[key])
        assert difference <= 1e-7 + 1e-5 * abs(expected[key]), (key, numbers[key], expected[key])
    assert [tasks for tasks, _ in found] == [tasks for tasks, _ in looked]
    for (_, mine), (_, theirs) in zip(found, looked, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-6)
