"""Validation is tried before the first step, and the run does not notice: with and without, its bytes are the same."""

import contextlib
import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, Dataset, IterableDataset

from etude import (
    Accuracy,
    BasicTrainingLoop,
    Callback,
    DataLoader,
    LossStrategy,
    LossTerm,
    LossTracker,
    Trainer,
    ValidationLoop,
)
from etude.core import DataError, Task, TrainingError
from etude.trainer.sanity_check import _explained
from run_files import records, weights

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
OUT_OF_MEMORY = 2**60  # elements: more than any machine has


def net(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3), *extra)


class Drawing(nn.Module):
    """Draws random numbers and counts its calls, in validation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        noise = torch.randn_like(x) + random.random() + np.random.rand()
        return x + 0.01 * noise + 0.001 * self.mean


class Centred(LossStrategy):
    """A loss with state of its own: attributes that it replaces, changes in place, and a buffer."""

    def __init__(self):
        self.calls, self.seen, self.module = 0, [], nn.BatchNorm1d(3, affine=False)
        self.centre = torch.zeros(3)

    def terms(self, output, batch, *, metrics):
        self.calls += 1
        self.seen.append(self.calls)
        self.centre.mul_(0.9).add_(output.detach().mean(0))
        logits = self.module(output) + 0.01 * self.calls + 0.1 * self.centre + self.module.running_mean
        return {"loss": LossTerm(F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1]))}


class Noisy(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.randn(6) + random.random(), Y[index]


class Passes(IterableDataset):
    """Remembers how often it has been passed over."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        self.count += 1
        yield from zip(X + self.count, Y, strict=True)


SOURCES = {
    "tensors": lambda: (X, Y),
    "etude": lambda: DataLoader(X, Y, 8, shuffle=False),
    "etude dataset": lambda: DataLoader(Noisy(), batch_size=8, seed=3),
    "etude workers": lambda: DataLoader(Noisy(), batch_size=8, num_workers=1, persistent_workers=True),
    "prefetching": lambda: DataLoader(X, Y, 8, prefetch=2),
    "list": lambda: [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)],
    "torch": lambda: TorchDataLoader(Noisy(), batch_size=8, shuffle=True),
    "torch workers": lambda: TorchDataLoader(Noisy(), batch_size=8, num_workers=1),
    "torch persistent": lambda: TorchDataLoader(Noisy(), batch_size=8, num_workers=1, persistent_workers=True),
    "torch iterable": lambda: TorchDataLoader(Passes(), batch_size=8),
    "generator": lambda: ((X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)),
    "function": lambda: lambda: ((X[i : i + 8] + random.random(), Y[i : i + 8]) for i in range(0, 40, 8)),
}


def trainer(folder, val, *, model=None, loss=None, tried=2, callbacks=(), **config):
    config = {"epochs": 1, "batch_size": 8, "log_interval": 2, "device": "cpu", "sanity_val_batches": tried, **config}
    model = net(Drawing()) if model is None else model
    return Trainer(
        model, (X, Y), val, config=config, loss=loss, callbacks=callbacks, output_dir=folder, progress=False
    )


def outcome(folder):
    """Return weights and records of a run, without times."""
    return weights(folder), (folder / "checkpoints/last/state.safetensors").read_bytes(), records(folder)


@pytest.mark.parametrize("name", SOURCES)
def test_a_run_with_and_without_the_check_is_the_same(tmp_path, name):
    for tried in (0, 2):
        trainer(tmp_path / str(tried), SOURCES[name](), tried=tried).train()
    assert outcome(tmp_path / "2") == outcome(tmp_path / "0")


@pytest.mark.parametrize("loss", [None, Centred, nn.CrossEntropyLoss], ids=str)
def test_losses_with_state_do_not_notice(tmp_path, loss):
    for tried in (0, 2):
        trainer(tmp_path / str(tried), (X, Y), loss=loss and loss(), tried=tried, epochs=2).train()
    assert outcome(tmp_path / "2") == outcome(tmp_path / "0")


def test_a_run_resumed_with_the_check_is_that_of_one_never_stopped(tmp_path):
    class Stop(Callback):
        def on_step_end(self, report):
            self.control.request_stop("test")

    trainer(tmp_path / "straight", (X, Y), epochs=2).train()
    for _ in range(9):
        one = trainer(tmp_path / "stopped", (X, Y), callbacks=[Stop()], epochs=2)
        if (tmp_path / "stopped" / "checkpoints" / "last").exists():
            one.load_checkpoint(tmp_path / "stopped")
        one.train()
    last = trainer(tmp_path / "stopped", (X, Y), epochs=2)
    last.load_checkpoint(tmp_path / "stopped")
    last.train()
    assert outcome(tmp_path / "stopped")[0] == outcome(tmp_path / "straight")[0]


def test_the_loss_is_chosen_by_the_training_data(tmp_path):
    def chosen(tried):
        one = trainer(None, (X, F.one_hot(Y, 3).float()), tried=tried, max_steps=1, epochs=None)
        with contextlib.suppress(DataError, TrainingError):
            one.train()
        return one.task.strategy.chosen

    assert type(chosen(0)) is type(chosen(1))


def test_metrics_of_the_user_do_not_notice():
    class Look(Callback):
        def on_step_end(self, report):
            seen.append([metric.state_dict() for metric in metrics[1::2]])

    seen, metrics = [], [LossTracker(), LossTracker(), Accuracy(), Accuracy()]
    before = repr([metric.state_dict() for metric in metrics[1::2]])
    loop = BasicTrainingLoop(net(), metrics=metrics, callbacks=[Look()], progress=False, config={"device": "cpu"})
    loop.fit((X, Y), (X, Y), epochs=1)
    assert repr(seen[0]) == before


@dataclass(frozen=True)
class Scaled(Task):
    scale: float

    def __call__(self, model, batch, *, metrics):
        inputs, labels = batch
        return {"loss": LossTerm(self.scale * F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))}


def test_a_task_may_be_frozen():
    data = torch.utils.data.TensorDataset(X, Y)
    config = {"epochs": 1, "batch_size": 8, "device": "cpu", "sanity_val_batches": 2}
    found = Trainer(net(), data, data, task=Scaled(2.0), config=config, progress=False).train()
    assert found["val_loss"] > 0


class Watch(Callback):
    steps = 0

    def on_step_begin(self, step):
        self.steps += 1


BAD = {
    "other features": (torch.randn(8, 5), Y[:8]),
    "labels out of range": (X, Y + 2),
    "fewer labels": [(X[:8], Y[:7])],
    "no samples": (X[:0], Y[:0]),
    "no batches": [],
    "second batch": [(X[:8], Y[:8]), (X[:8, :5], Y[:8])],
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_found_before_the_first_step(tmp_path, name):
    watch = Watch()
    with pytest.raises((DataError, TrainingError)) as caught:
        trainer(tmp_path, BAD[name], model=net(), callbacks=[watch]).train()
    assert "val" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert watch.steps == 0
    trainer(tmp_path, (X, Y), model=net()).train()  # the folder is free for the corrected run


def test_a_resumed_run_is_tried_too(tmp_path):
    trainer(tmp_path, (X, Y), model=net()).train()
    watch = Watch()
    one = trainer(tmp_path, BAD["other features"], model=net(), callbacks=[watch], epochs=2)
    one.load_checkpoint(tmp_path)
    with pytest.raises(DataError, match="validation"):
        one.train()
    assert watch.steps == 0


def test_only_so_many_batches_are_read():
    class Batches(list):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                read.append(number)
                yield batch

    read = []
    one = trainer(None, Batches([(X, Y)] * 5), tried=2, epochs=1)
    one.callbacks.append(first := Watch())
    first.on_step_begin = lambda step: read.append("step")
    one.callbacks._hooks["on_step_begin"].append(first.on_step_begin)
    one.train()
    assert list(itertools.takewhile(lambda entry: entry != "step", read)) == [0, 1]


def test_a_lazy_model_is_shaped_by_its_first_step(tmp_path):
    def lazy():
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))

    for tried in (0, 2):
        one = trainer(tmp_path / str(tried), (X, Y), model=lazy(), tried=tried, learning_rate=0.01)
        one.train()
    assert outcome(tmp_path / "2")[0] == outcome(tmp_path / "0")[0]


def test_a_compiled_model_is_not_compiled_for_shapes_of_validation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    graphs = []

    def backend(graph, inputs):
        graphs.append([tuple(one.shape) if isinstance(one, torch.Tensor) else "any size" for one in inputs])
        return graph.forward

    torch.compiler.reset()
    model = Model()
    model.compile(backend=backend)
    trainer(None, [(X, Y)], model=model, max_steps=1, epochs=None).train()
    torch.compiler.reset()
    assert (8, 6) in graphs[0]  # that of training, and for that size alone
    assert "any size" not in graphs[0]


# ------------------------------------------------------------------------------------------------ memory


class Hungry(nn.Module):
    """Needs too much memory in evaluation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))

    def forward(self, x):
        if not self.training:
            torch.empty(OUT_OF_MEMORY)
        return x @ self.weight


DOORS = {
    "first batches": lambda: trainer(None, (X, Y), model=Hungry()).train(),
    "validation": lambda: trainer(None, (X, Y), model=Hungry(), tried=0).train(),
    "evaluate": lambda: trainer(None, (X, Y), model=Hungry()).evaluate(),
    "ValidationLoop": lambda: ValidationLoop().validate_epoch(Hungry(), DataLoader(X, Y, 8)),
}


@pytest.mark.parametrize("door", DOORS)
def test_memory_that_runs_out_in_validation_has_remedies(door):
    with pytest.raises(TrainingError, match=r"out of memory on cpu in validation; remedies: .*batch") as caught:
        DOORS[door]()
    assert "grad_accum_steps" not in str(caught.value)  # is of no help there
    assert str(caught.value).count("remedies") == 1


def test_memory_that_runs_out_for_the_model_or_its_optimizer_has_remedies():
    class Big(nn.Linear):
        def to(self, *args, **kwargs):
            torch.empty(OUT_OF_MEMORY)

    def optimizer(params):
        torch.empty(OUT_OF_MEMORY)

    for options in ({"model": Big(6, 3)}, {"model": net(), "optimizer": optimizer}):
        with pytest.raises(TrainingError, match=r"out of memory on cpu.*smaller model"):
            Trainer(options.pop("model"), (X, Y), device="cpu", progress=False, **options)


@pytest.mark.parametrize("together", [False, True])
def test_a_lost_process_is_not_blamed_on_the_data(together):
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49072")
    with pytest.raises(RuntimeError) as caught, _explained(together=together):
        raise lost
    assert caught.value is lost
