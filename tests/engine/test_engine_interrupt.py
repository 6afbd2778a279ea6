"""Signals while a run validates: it stops between two batches, and a resumed run repeats the validation."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from etude import Callback, Trainer
from etude.engine.stopping import Interrupts
from run_files import records, weights

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


class Validation(list):
    """Batches; before batch `at` of pass `number` it sends a signal to this process."""

    def __init__(self, number=None, at=0, sent=signal.SIGTERM):
        super().__init__((X[i : i + 10], Y[i : i + 10]) for i in range(0, 40, 10))
        self.number, self.at, self.sent = number, at, sent
        self.passes = self.seen = 0

    def __iter__(self):
        self.passes, self.seen = self.passes + 1, 0
        for place, batch in enumerate(super().__iter__()):
            if (self.passes, place) == (self.number, self.at):
                os.kill(os.getpid(), self.sent)
            self.seen += 1
            yield batch


def make(folder, validation, callbacks=(), **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    config = {"epochs": 3, "batch_size": 8, "device": "cpu", "log_interval": 2, "learning_rate": 0.01, **config}
    return Trainer(
        model, (X, Y), validation, config=config, callbacks=callbacks, output_dir=folder, progress=False, resume=True
    )


def facts(folder):
    """What a run leaves, whatever its speed."""
    checkpoints = folder / "checkpoints"
    return (
        records(folder),
        sorted(path.name for path in checkpoints.glob("step-*")),
        [(checkpoints / name).resolve().name for name in ("last", "best")],
        weights(folder),
        (checkpoints / "last" / "state.safetensors").read_bytes(),
    )


PLANS = {
    "end of epoch": {},
    "inside": {"validate_every_steps": 3},
    "inside and saving": {"validate_every_steps": 2, "save_every_steps": 2},
    "end of steps": {"max_steps": 13},
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_validation_that_is_cut_off_is_repeated(tmp_path, plan):
    whole = Validation()
    make(tmp_path / "straight", whole, **PLANS[plan]).train()
    expected = facts(tmp_path / "straight")
    for number in {2, whole.passes // 2 + 1, whole.passes}:  # the first pass only tries two batches
        folder, validation = tmp_path / str(number), Validation(number, at=number % 4)
        trainer = make(folder, validation, **PLANS[plan])
        trainer.train()
        assert trainer.callbacks.control.reason == "SIGTERM"
        assert (validation.passes, validation.seen) == (number, number % 4 + 1)
        resumed = make(folder, Validation(), **PLANS[plan])
        assert resumed.state.clock.step == trainer.state.clock.step
        resumed.train()
        assert facts(folder) == expected


@pytest.mark.parametrize("at", [0, 1])
def test_a_signal_before_the_first_step_stops_before_it(tmp_path, at):
    make(tmp_path / "straight", Validation()).train()
    validation = Validation(1, at=at)  # while validation is tried
    trainer = make(tmp_path / "run", validation)
    result = trainer.train()
    assert result == {"interrupted": 1.0}
    assert trainer.state.clock.step == 0
    make(tmp_path / "run", Validation()).train()
    straight, run = facts(tmp_path / "straight"), facts(tmp_path / "run")
    assert run[0] == straight[0]
    assert run[2:] == straight[2:]


@pytest.mark.parametrize("times", [2, 3])
def test_it_may_be_cut_off_again_and_again(tmp_path, times):
    make(tmp_path / "straight", Validation(), validate_every_steps=3).train()
    for _ in range(times):
        make(tmp_path / "run", Validation(2, at=1), validate_every_steps=3).train()
    make(tmp_path / "run", Validation(), validate_every_steps=3).train()
    assert facts(tmp_path / "run") == facts(tmp_path / "straight")


class Averaged(Callback):
    """Changes the weights for the validation, and changes them back."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, run):
        self.model = run.model

    def on_validation_begin(self, epoch):
        self.calls.append("begin")
        self.kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        for param in self.model.parameters():
            param.data.zero_()

    def on_validation_end(self, epoch, metrics):
        self.calls.append("end")
        self.model.load_state_dict(self.kept)


class Undone(Averaged):
    def on_validation_cut_off(self, epoch):
        self.calls.append("cut off")
        self.model.load_state_dict(self.kept)


@pytest.mark.parametrize(("kind", "last"), [(Averaged, "end"), (Undone, "cut off")])
def test_what_callbacks_do_for_a_validation_is_not_saved(tmp_path, kind, last):
    make(tmp_path / "straight", Validation(), [kind()], validate_every_steps=3).train()
    callback = kind()
    make(tmp_path / "run", Validation(2, at=1), [callback], validate_every_steps=3).train()
    assert callback.calls[-2:] == ["begin", last]
    make(tmp_path / "run", Validation(), [kind()], validate_every_steps=3).train()
    assert facts(tmp_path / "run") == facts(tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_signal_is_an_exception(number):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        assert interrupts.requested == signal.Signals(number).name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_hang_up_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.requested == ""
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_forked_from_the_run_can_be_ended():
    ready, there = os.pipe()
    with Interrupts():
        child = os.fork()
        if child == 0:
            os.write(there, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(there)
    assert os.WTERMSIG(status) == signal.SIGTERM


class StopsAt(Callback):
    """Stops the run by what a validation measured, as callbacks do that wait for a number."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_begin(self, run):
        self.clock = run.clock

    def on_validation_end(self, epoch, metrics):
        if self.clock.step == self.step:
            self.control.request_stop("good enough")


@pytest.mark.parametrize("step", [3, 5])  # inside an epoch, and after its last step
def test_a_repeated_validation_that_stops_the_run_stops_it_before_another_step(tmp_path, step):
    plan = {"validate_every_steps": step}
    make(tmp_path / "straight", Validation(), [StopsAt(step)], **plan).train()
    cut_off = make(tmp_path / "run", Validation(2, at=1), [StopsAt(step)], **plan)
    cut_off.train()
    assert cut_off.state.clock.step == step
    resumed = make(tmp_path / "run", Validation(), [StopsAt(step)], **plan)
    resumed.train()
    assert resumed.state.clock.step == step
    assert facts(tmp_path / "run") == facts(tmp_path / "straight")
