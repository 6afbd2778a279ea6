"""Compiled steps: terms and gradients of usual ones, odd batches as usual, and a compiler that fails does no harm."""

import contextlib
import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

from batch_classes import GraphBatch, Plain, graphs
from etude import Trainer
from etude.core import DataError
from etude.engine.compiled import CompiledTask, count_flops, most_flops, saves_time
from etude.losses import ClassificationLoss, LanguageModelingLoss, SupervisedTask
from etude.models import CausalTransformerLM, LeNet5
from etude.multitask import LinearHead, MultiTask, MultiTaskModel, TaskSpec
from etude.trainer import optimization

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch.compile does it itself

NAMES = ("a", "b")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pictures(rows=4):
    return torch.randn(rows, 1, 28, 28), torch.randint(10, (rows,))


def language(**options):
    model = CausalTransformerLM(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_len=8, dropout=0.0)
    return model, SupervisedTask(LanguageModelingLoss(**options)), {"tokens": torch.randint(32, (4, 8))}


def tasks():
    model = MultiTaskModel(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU()), {name: LinearHead(3, in_features=8) for name in NAMES}
    )
    specs = {name: TaskSpec(name, nn.CrossEntropyLoss(), labels=name, weight=0.5) for name in NAMES}
    return model, MultiTask(specs), {"input": torch.randn(4, 6), **{name: torch.randint(3, (4,)) for name in NAMES}}


class OfPlain(nn.Linear):
    """Takes a dataclass."""

    def forward(self, batch):
        return super().forward(batch.x)


class OfGraphs(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x)[: len(batch.y)]


CASES = {
    "pictures": lambda: (LeNet5(), SupervisedTask(ClassificationLoss()), pictures()),
    "inferred": lambda: (LeNet5(), SupervisedTask(), pictures()),
    "torch's loss": lambda: (nn.Linear(3, 2), SupervisedTask(nn.MSELoss()), (torch.randn(4, 3), torch.randn(4, 2))),
    "a dataclass": lambda: (OfPlain(3, 2), SupervisedTask(), Plain(torch.randn(4, 3), torch.randint(2, (4,)))),
    "language": lambda: language(shift=True),
    "several tasks": tasks,
}


def compiled(task, graphs=None, **options):
    """Compile without a compiler; count the graphs."""

    def keep(graph, _inputs):
        if graphs is not None:
            graphs.append(graph)
        return graph

    options = {"notice": lambda _words: None, "warn": lambda _words: None, **options}
    return CompiledTask(task, **{"backend": keep, **options})


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_terms_and_gradients_are_those_of_the_task_in_one_graph(case, metrics):
    torch.manual_seed(0)
    model, task, batch = CASES[case]()
    usual = task(model, batch, metrics=metrics)
    found = compiled(task, graphs := [])(model, batch, metrics=metrics)
    assert len(graphs) == 1
    assert found.keys() == usual.keys()
    for name, term in found.items():
        torch.testing.assert_close(term.sum, usual[name].sum)
        assert float(term.count) == float(usual[name].count)
        assert (term.weight, term.reported, term.optional) == (
            usual[name].weight,
            usual[name].reported,
            usual[name].optional,
        )
    params = list(model.parameters())
    mine, theirs = (
        torch.autograd.grad(sum(term.sum for term in terms.values() if term.is_weighted), params, allow_unused=True)
        for terms in (found, usual)
    )
    for one, other in zip(mine, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("batch_size", [4, None])
def test_the_odd_last_batch_of_an_epoch_is_not_compiled(batch_size):
    task = compiled(SupervisedTask(ClassificationLoss()), graphs := [], batch_size=batch_size)
    model = LeNet5()
    for rows in (4, 4, 3, 4, 4, 3):
        task(model, pictures(rows), metrics=True)
    assert len(graphs) == 1


def test_what_the_first_batch_decides_leaves_no_trace_in_model_or_generators():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch, task = pictures(), compiled(SupervisedTask())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    task._begin(model, batch, True)
    assert task.refused is None
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_compiler_that_fails_is_said_and_the_task_runs_as_usual():
    def fail(*_args):
        raise RuntimeError("no compiler here")

    notices, warnings = [], []
    task = compiled(SupervisedTask(ClassificationLoss()), backend=fail, notice=notices.append, warn=warnings.append)
    for _ in range(3):
        assert "loss" in task(LeNet5(), pictures(), metrics=False)
    assert len(notices) == 1
    assert len(warnings) == 1
    assert "no compiler here" in warnings[0]


def test_mistakes_in_the_model_are_explained_as_ever():
    trainer = Trainer(
        nn.Sequential(nn.Flatten(), nn.Linear(5, 2)),
        pictures(),
        config={"epochs": 1, "batch_size": 4, "compile": "step", "sanity_val_batches": 0},
        progress=False,
    )
    with pytest.raises(DataError, match="784"):
        trainer.train()


class Pausing(nn.Module):
    """Leaves compiled code in the middle of its forward pass; sends signals there, or has the compiler send them."""

    def __init__(self, place="", signals=()):
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(4, 6), nn.Linear(6, 1), 0
        self.place, self.signals = place, signals

    def forward(self, x):
        hidden = self.first(x)
        self.pause("model")
        return self.last(torch.tanh(hidden))

    @torch.compiler.disable
    def pause(self, place):
        self.calls += place == self.place
        if self.calls == 2 and place == self.place:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it where compiled code is left
@pytest.mark.parametrize(
    ("place", "signals"), [("model", [signal.SIGTERM, signal.SIGINT]), ("compiler", [signal.SIGTERM])]
)
def test_after_a_signal_in_the_compiler_or_its_code_the_process_resumes_to_the_same_bytes(
    tmp_path, monkeypatch, place, signals
):
    def make(folder, *pauses):
        torch.manual_seed(0)
        model = Pausing(*pauses)

        def backend(graph, _inputs):
            model.pause("compiler")
            return graph

        monkeypatch.setattr(optimization, "CompiledTask", partial(CompiledTask, backend=backend))
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        config = {"device": "cpu", "epochs": 2, "batch_size": 8, "compile": "step", "save_every_steps": 1}
        return Trainer(
            model, (x, x[:, :1]), loss=nn.MSELoss(), config=config, output_dir=folder, resume=True, progress=False
        )

    straight = make(tmp_path / "straight")
    straight.train()
    assert straight.compiled.refused is None
    trainer = make(tmp_path / "stopped", place, signals)
    with contextlib.nullcontext() if len(signals) == 1 else pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.clock.step < 6
    make(tmp_path / "stopped").train()
    for name in ("model.safetensors", "state.safetensors"):
        one, other = (tmp_path / run / "checkpoints" / "last" / name for run in ("straight", "stopped"))
        assert one.read_bytes() == other.read_bytes()


def test_a_short_run_is_not_worth_compiling_and_a_long_one_is():
    model, batch = LeNet5(), pictures()
    run = SupervisedTask().outputs
    decisions = [saves_time(steps, 1, run)(model, batch) for steps in (10, 100_000_000, None)]
    assert decisions == [False, True, True]
    next(model.children()).register_forward_hook(lambda *_: None)
    assert not saves_time(None, 1, run)(model, batch)


def tokens(rows, length, width):
    model = CausalTransformerLM(vocab_size=64, d_model=width, n_layers=2, n_heads=2, max_len=length, dropout=0.0)
    return model, {"input_ids": torch.randint(64, (rows, length))}


def padded_convolutions():
    layers = [nn.Conv2d(1, 64, 5, padding=4), nn.Conv2d(64, 64, 3, padding=2), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10)), pictures()


ZOO = {
    "lenet": lambda: (LeNet5(), pictures()),
    "convolutions": padded_convolutions,
    "mlp": lambda: (nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), torch.randn(8, 784)),
    "transformer": lambda: tokens(4, 64, 64),
    "long and narrow transformer": lambda: tokens(1, 512, 64),
}


@pytest.mark.parametrize("name", ZOO)
def test_a_run_that_is_surely_too_short_is_decided_without_counting(name, monkeypatch):
    """Counting imports the compiler, which takes longer than a short run."""
    model, batch = ZOO[name]()
    run, counted = SupervisedTask().outputs, []
    assert most_flops(model, batch) >= count_flops(model, batch, run)
    monkeypatch.setattr("etude.engine.compiled.count_flops", lambda *_: counted.append(1) or 0)
    assert not saves_time(100, 1, run)(model, batch)
    assert not counted


@pytest.mark.parametrize("mode", ["auto", "step"])
def test_batches_whose_shapes_nobody_knows_are_compiled_only_if_asked_for(mode):
    made = []
    model, task = OfGraphs(4, 2), SupervisedTask()
    run = compiled(task, made, mode=mode)
    batch = graphs([3, 4])
    expected = task(model, batch, metrics=False)["loss"].sum
    assert torch.allclose(run(model, batch, metrics=False)["loss"].sum, expected)
    assert (GraphBatch.__name__ in (run.refused or "")) == (mode == "auto")
    assert bool(made) == (mode == "step")
