"""`training.async_save`: a thread writes checkpoints while training goes on; their files are those of a plain save."""

import errno
import json
import signal
import threading

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.checkpoint import CheckpointManager, pack, read_checkpoint
from etude.checkpoint.durable import HashedFile
from etude.core import CheckpointError
from etude.engine.callback import Callback


class Watch(Callback):
    """Records what is reported, and can do something at a step."""

    def __init__(self, at=None):
        super().__init__()
        self.told, self.steps, self.at = [], 0, at or {}

    def on_step_end(self, report):
        self.steps += 1
        if self.steps in self.at:
            self.at[self.steps]()

    def on_checkpoint(self, path):
        assert (path / "manifest.json").exists()  # it is complete when it is reported
        self.told.append((path.name, self.steps))


class Gate:
    """Holds the thread that writes until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.open = threading.Event(), threading.Event()
        sync = HashedFile.sync

        def held(file):
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.open.wait(60)
            sync(file)

        monkeypatch.setattr(HashedFile, "sync", held)


def trainer(folder, watch=None, **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    settings = {"epochs": 1, "batch_size": 4, "device": "cpu", "ema": 0.9, **config}
    callbacks = [] if watch is None else [watch]
    data = x, (x.sum(1) > 0).long()
    return Trainer(model, data, config=settings, callbacks=callbacks, output_dir=folder, progress=False)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_the_files_are_those_of_a_plain_save(tmp_path):
    for name, background in (("plain", False), ("background", True)):
        run = trainer(tmp_path / name, epochs=3, save_every_steps=1, keep_best=99, async_save=background)
        run.train()
    assert names(tmp_path / "plain") == names(tmp_path / "background")
    assert len(names(tmp_path / "plain")) == 24
    for name in names(tmp_path / "plain"):
        plain, background = (tmp_path / one / "checkpoints" / name for one in ("plain", "background"))
        assert (plain / "model.safetensors").read_bytes() == (background / "model.safetensors").read_bytes()
        left, right = read_checkpoint(plain).state, read_checkpoint(background).state
        for state in (left, right):
            del state["ledger"]  # it has times
        tensors, structure = pack(left)
        others, other_structure = pack(right)
        assert structure == other_structure
        torch.testing.assert_close(tensors, others, rtol=0, atol=0)


def test_training_goes_on_while_a_thread_writes(tmp_path, monkeypatch):
    gate, seen = Gate(monkeypatch), []
    watch = Watch(
        {3: lambda: (gate.reached.wait(60), seen.append((names(tmp_path), list(watch.told))), gate.open.set())}
    )
    run = trainer(tmp_path, watch, save_every_steps=2, keep_best=99, async_save=True)
    run.train()
    assert seen == [([], [])]  # a step later it still had no name, and was not reported
    assert [name for name, _ in watch.told] == [f"step-{step:08d}" for step in (2, 4, 6, 8, 8)]
    assert names(tmp_path) == [name for name, _ in watch.told[:-1]]
    assert watch.told[0][1] > 2
    assert watch.told[-1][1] == 8  # the end of the run waits
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [one["path"].rpartition("/")[2] for one in events if one.get("path")] == [name for name, _ in watch.told]


def test_the_copy_is_of_the_step_that_is_saved(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    watch = Watch({4: gate.open.set})
    run = trainer(tmp_path / "held", watch, save_every_steps=2, keep_best=99, max_steps=4, async_save=True)
    run.train()
    trainer(tmp_path / "plain", save_every_steps=2, keep_best=99, max_steps=4).train()
    held, plain = (
        CheckpointManager(tmp_path / one / "checkpoints").load("step-00000002") for one in ("held", "plain")
    )
    torch.testing.assert_close(held.model_state, plain.model_state, rtol=0, atol=0)
    torch.testing.assert_close(held.state["rng"], plain.state["rng"], rtol=0, atol=0)
    assert held.state["clock"] == plain.state["clock"]


def test_a_write_that_fails_ends_the_run(tmp_path, monkeypatch):
    sync = HashedFile.sync
    failing = threading.Event()

    def full(file):
        if failing.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(HashedFile, "sync", full)
    watch = Watch({4: failing.set})
    run = trainer(tmp_path, watch, epochs=100, save_every_steps=4, async_save=True)
    with pytest.raises(CheckpointError, match=r"step-00000004: No space left on device; free some space"):
        run.train()
    assert 4 <= watch.steps <= 8
    assert watch.told == []
    assert names(tmp_path) == []
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_an_error_of_training_waits_for_the_write(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def fail():
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.open.set).start()
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        trainer(tmp_path, Watch({3: fail}), save_every_steps=2, async_save=True).train()
    assert names(tmp_path) == ["step-00000002"]


def test_an_interrupt_waits_for_the_write(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def interrupt():
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.open.set).start()
        signal.raise_signal(signal.SIGTERM)

    watch = Watch({3: interrupt})
    trainer(tmp_path, watch, save_every_steps=2, keep_best=99, async_save=True).train()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert [name for name, _ in watch.told] == names(tmp_path)


def test_the_best_weights_are_restored_after_their_write(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.open.set()
    x = torch.randn(32, 4)
    settings = {"epochs": 3, "batch_size": 4, "device": "cpu", "restore_best": True, "async_save": True}
    labels = (x.sum(1) > 0).long()
    model = nn.Linear(4, 2)
    config = {**settings, "monitor": "val_loss", "mode": "max"}  # the first epoch is the best
    run = Trainer(model, (x, labels), (x, labels), config=config, output_dir=tmp_path)
    run.train()
    best = CheckpointManager(tmp_path / "checkpoints", monitor="val_loss", mode="max").load("best")
    assert best.meta["step"] == 8
    torch.testing.assert_close(model.state_dict(), best.model_state, rtol=0, atol=0)


def test_save_checkpoint_returns_when_the_files_are_there(tmp_path):
    run = trainer(tmp_path, async_save=True)
    path = run.save_checkpoint()
    assert (path / "manifest.json").exists()
    assert read_checkpoint(path).state["clock"]["step"] == 0
