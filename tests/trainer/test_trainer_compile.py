"""What a run decides about compiling is kept: a resumed run compiles the batches that the run never stopped does.

A stand-in for the compiler changes the loss a little, so that the weights tell which batches were compiled.
"""

import logging

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.checkpoint import read_checkpoint
from etude.checkpoint.store import write_checkpoint
from etude.engine import compiled as module
from etude.engine.compiled import CompiledTask
from etude.trainer.machine import Machine

SIZES = (3, 5, 4, 5, 2, 6, 6, 1)
"""Of the batches of an epoch: what is a whole batch depends on those before."""


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Compile on the CPU too, in the mode auto if a run has more than 4 epochs; return the sizes that were compiled."""
    sizes = []

    def of(function, **_):
        def run(task, model, batch, metrics):
            sizes.append(len(batch[0]))
            found = function(task, model, batch, metrics)
            return {name: (1.25 * parts[0], *parts[1:]) for name, parts in found.items()}

        return run

    monkeypatch.setattr(torch, "compile", of)
    monkeypatch.setattr("etude.trainer.machine.compile_in_place", lambda _model: None)
    decide = Machine.compiled
    monkeypatch.setattr(Machine, "compiled", lambda self, mode: decide(self, "step" if mode == "auto" else mode))
    monkeypatch.setattr(module, "SAVED_LAYER_S", 2 * (module.COMPILE_S + module.COMPILE_LAYER_S) / (4 * len(SIZES)))
    return sizes


class StopAt(Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_step_end(self, report):
        if self.run.clock.step == self.step:
            self.control.request_stop("test")

    def on_train_begin(self, run):
        self.run = run


def batches(sizes=SIZES, width=4):
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(size, width, generator=generator) for size in sizes]
    return [(one, one[:, :1]) for one in x]


def make(folder, stop=None, *, data=None, **config):
    torch.manual_seed(0)
    return Trainer(
        nn.Linear(4, 1),
        batches() if data is None else data,
        loss=nn.MSELoss(),
        config={"device": "cpu", "epochs": 5, "learning_rate": 0.01, **config},
        callbacks=[StopAt(stop)] if stop else [],
        output_dir=folder,
        resume=folder is not None,
        progress=False,
    )


def kept(folder):
    last = folder / "checkpoints" / "last"
    files = [(last / name).read_bytes() for name in ("model.safetensors", "state.safetensors")]
    return *files, read_checkpoint(last).state["compile"]


@pytest.mark.parametrize(("mode", "epochs"), [("auto", 5), ("auto", 2), ("step", 2)])
def test_stopped_after_any_step_a_run_compiles_the_same_batches(tmp_path, compiler, mode, epochs):
    make(tmp_path / "a", epochs=epochs, compile=mode).train()
    straight = [*compiler]
    assert straight[:6] == ([] if (mode, epochs) == ("auto", 2) else [3, 5, 5, 6, 6, 6])
    compiler.clear()
    for stop in (*range(1, 12), None):
        make(tmp_path / "b", stop, epochs=epochs, compile=mode).train()
    assert compiler == straight
    assert kept(tmp_path / "b") == kept(tmp_path / "a")


@pytest.mark.parametrize(("first", "then"), [(1, 6), (6, 9), (6, 1)])
def test_more_or_fewer_epochs_do_not_change_what_auto_has_decided(tmp_path, compiler, first, then):
    one = make(tmp_path / "a", stop=3, epochs=first)
    one.train()
    compiled_before = bool(compiler)
    assert compiled_before == (first > 4)
    one.train(then)
    make(tmp_path / "b", stop=3, epochs=first).train()
    compiler.clear()
    make(tmp_path / "b", epochs=then).train()
    assert bool(compiler) == compiled_before
    assert kept(tmp_path / "b")[0] == kept(tmp_path / "a")[0]


def test_a_checkpoint_without_decisions_loads_and_the_run_decides_by_itself(tmp_path, compiler):
    make(tmp_path / "a", stop=3).train()
    checkpoint = read_checkpoint(tmp_path / "a" / "checkpoints" / "last")
    old = {key: value for key, value in checkpoint.state.items() if key != "compile"}
    assert len(old) == len(checkpoint.state) - 1
    write_checkpoint(tmp_path / "old", checkpoint.model_state, old, checkpoint.meta)
    for epochs in (2, 6):
        compiler.clear()
        trainer = make(None, epochs=epochs)
        trainer.load_checkpoint(tmp_path / "old")
        trainer.train()
        assert bool(compiler) == (epochs > 4)


@pytest.mark.parametrize(
    ("before", "after", "is_compiled", "is_said"),
    [
        ("step", "off", False, True),
        ("step", "model", False, True),
        ("step", "step", True, False),
        ("step", "auto", True, False),
        ("off", "off", False, False),
        ("off", "step", True, True),
        ("off", "auto", False, False),
        ("model", "step", True, True),
        ("model", "model", False, False),
        ("auto", "step", True, True),
        ("auto", "off", False, False),
        ("auto", "auto", False, False),
    ],
)
def test_an_explicit_setting_wins_and_one_line_says_so(
    tmp_path, compiler, caplog, before, after, is_compiled, is_said
):
    make(tmp_path, stop=3, epochs=2, compile=before).train()
    compiler.clear()
    with caplog.at_level(logging.WARNING, "etude"):
        trainer = make(tmp_path, epochs=2, compile=after)
    lines = [line for line in caplog.messages if f"training.compile is {after}" in line]
    assert len(lines) == is_said
    trainer.train()
    assert bool(compiler) == is_compiled


def test_the_shapes_that_are_compiled_stay_the_same_where_there_are_too_many(tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(module, "MOST_SHAPES", 2)
    data = [
        (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)), torch.ones(size, 1))
        for size in (3, 4, 5, 6, 5, 4, 3)
    ]
    monkeypatch.setattr(CompiledTask, "_is_whole", lambda *_: True)
    make(tmp_path / "a", data=data, epochs=1, compile="step").train()
    assert compiler == [3, 4, 4, 3]
    for stop in (1, 2, 3, 4, 5, 6, None):
        make(tmp_path / "b", stop, data=data, epochs=1, compile="step").train()
    assert kept(tmp_path / "b") == kept(tmp_path / "a")


def test_where_the_compiler_has_failed_it_is_not_tried_again(tmp_path, monkeypatch, caplog):
    from torch._dynamo.exc import Unsupported

    compiling = torch.compile
    tried = []

    def fails_for_six(function, **options):
        run = compiling(function, **options)

        def attempt(task, model, batch, metrics):
            tried.append(len(batch[0]))
            if len(batch[0]) == 6:
                raise Unsupported("six", "six")
            return run(task, model, batch, metrics)

        return attempt

    monkeypatch.setattr(torch, "compile", fails_for_six)
    make(tmp_path / "a", epochs=2, compile="step").train()
    assert tried == [3, 5, 5, 6]
    for stop in (2, 5, 6, 7, 11, None):
        make(tmp_path / "b", stop, epochs=2, compile="step").train()
    assert tried == [3, 5, 5, 6] * 2
    assert kept(tmp_path / "b") == kept(tmp_path / "a")
    assert any("not compiled" in line for line in caplog.messages)
