"""What all sinks share: a thread that never stops or slows training, and the end of a run."""

import logging
import os
import threading
import time

import pytest
import torch
from torch import nn

import etude
from etude.callbacks import Callback, SinkCallback
from etude.callbacks.sinks import base, worker
from etude.callbacks.sinks.base import ThinnedSink
from etude.core import ConfigError
from etude.monitor import MediaLogged, Noted, RunEnded, RunStarted, StepsLogged, Validated

DATA = (torch.randn(64, 4), torch.randint(0, 3, (64,)))


class Kept(SinkCallback):
    """Keeps what it is given, and fails where it is told to."""

    label = "kept"

    def __init__(self, fails_in: str = "") -> None:
        super().__init__()
        self.fails_in = fails_in
        self.events = []
        self.threads = set()
        self.closed = 0

    def _note(self, what):
        self.threads.add(threading.current_thread().name)
        if what == self.fails_in:
            raise RuntimeError(f"no {what}\nat all")

    def open_run(self, start):
        self.events.append(start)
        self._note("open")

    def write(self, events):
        self._note("write")
        self.events += events

    def close_run(self):
        self.closed += 1
        self._note("close")


def train(*callbacks, epochs=2, data=DATA, **kwargs):
    config = {"epochs": epochs, "batch_size": 8, "log_interval": 2, "device": "cpu", **kwargs.pop("config", {})}
    torch.manual_seed(0)
    trainer = etude.Trainer(
        nn.Linear(4, 3), data, DATA, config=config, callbacks=list(callbacks), progress=False, **kwargs
    )
    return trainer, trainer.train()


def test_events_are_written_in_order_on_one_thread(tmp_path):
    sink = Kept()
    train(sink, output_dir=tmp_path / "run")
    kinds = [type(one) for one in sink.events if not isinstance(one, Noted)]
    assert kinds[0] is RunStarted
    assert kinds[-1] is RunEnded
    assert [one.step for one in sink.events if isinstance(one, StepsLogged)] == list(range(2, 18, 2))
    assert [one.step for one in sink.events if isinstance(one, Validated)] == [8, 16]
    assert sink.threads == {"etude-kept"}
    assert sink.closed == 1
    assert not [one for one in threading.enumerate() if one.name == "etude-kept"]


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_fails_is_reported_once_and_changes_nothing(where, caplog, tmp_path):
    _, expected = train()
    with caplog.at_level(logging.WARNING, logger="etude"):
        trainer, found = train(Kept(where), output_dir=tmp_path / "run")
    assert found["loss"] == expected["loss"]
    messages = [one.getMessage() for one in caplog.records]
    assert len(messages) == 1
    assert f"kept: RuntimeError: no {where} at all" in messages[0]
    assert "training continues" in messages[0]
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count("no " + where) == 1
    assert trainer.state.clock.step == 16


def test_a_full_queue_drops_the_oldest_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(worker, "MOST_EVENTS", 3)
    may_write = threading.Event()

    class Slow(Kept):
        def open_run(self, start):
            assert may_write.wait(60)

    class Free(Callback):
        def on_train_end(self, result):
            may_write.set()

    sink = Slow()
    with caplog.at_level(logging.WARNING, logger="etude"):
        train(Free(), sink)
    assert [one.getMessage() for one in caplog.records] == [
        "kept: events come faster than they are written; the oldest of 3 are dropped; training continues"
    ]
    assert isinstance(sink.events[-1], RunEnded)
    assert len(sink.events) <= 4


def test_a_sink_that_hangs_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(base, "DRAIN_S", 0.05)
    released = threading.Event()

    class Stuck(Kept):
        def write(self, events):
            released.wait(60)

    with caplog.at_level(logging.WARNING, logger="etude"):
        train(Stuck())
    released.set()
    assert "kept: not done after 0.05 s" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")], ids=["Ctrl-C", "error"])
def test_what_was_logged_before_an_exception_is_written(error):
    class Raises(Callback):
        def on_epoch_end(self, epoch, logs):
            raise error

    sink = Kept()
    with pytest.raises(type(error)):
        train(sink, Raises())
    assert [one.step for one in sink.events if isinstance(one, StepsLogged)] == [2, 4, 6, 8]
    assert sink.events[-1].status == ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    assert sink.closed == 1


def test_what_others_publish_at_the_end_arrives():
    class Publishes(Callback):
        def on_train_end(self, result):
            self.publish("last words", "text", "the end")

    sink = Kept()
    train(sink, Publishes())
    assert [one.data for one in sink.events if isinstance(one, MediaLogged)] == ["the end"]
    assert isinstance(sink.events[-1], RunEnded)


def test_evaluating_alone_starts_nothing():
    sink = Kept()
    trainer = etude.Trainer(nn.Linear(4, 3), DATA, DATA, callbacks=[sink], config={"device": "cpu"}, progress=False)
    trainer.evaluate()
    trainer.predict(DATA[0])
    assert sink.events == []
    assert sink.threads == set()


def test_two_runs_of_one_callback():
    sink = Kept()
    train(sink, epochs=1)
    train(sink, epochs=1)
    assert sum(isinstance(one, RunStarted) for one in sink.events) == 2
    assert sink.closed == 2


def test_forked_workers_of_a_loader_write_nothing(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, place):
            sink.on_log({"loss": float(os.getpid())})  # as a careless data set might
            return DATA[0][place], DATA[1][place]

    sink = Kept()
    train(sink, data=Rows(), epochs=1, config={"num_workers": 2})
    logged = [one.metrics["loss"] for one in sink.events if isinstance(one, StepsLogged)]
    assert len(logged) == 2
    assert not [loss for loss in logged if loss > 100]


def test_log_points_that_come_too_fast_are_thinned_but_not_the_last_of_an_epoch(caplog):
    class Thinned(ThinnedSink):
        label = "thinned"

        def __init__(self):
            super().__init__(points_per_s=0.001)
            self.events = []

        def write(self, events):
            self.events += events

    sink = Thinned()
    with caplog.at_level(logging.INFO, logger="etude"):
        train(sink, epochs=3, config={"log_interval": 1})
    steps = [one.step for one in sink.events if isinstance(one, StepsLogged)]
    assert steps == [1, 8, 16, 24]
    order = [(type(one), one.step) for one in sink.events]
    assert order.index((StepsLogged, 8)) < order.index((Validated, 8))
    assert caplog.text.count("log points per second") == 1


def test_a_missing_package_is_one_line_before_the_first_step(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    steps = []

    class Counts(Callback):
        def on_step_end(self, report):
            steps.append(1)

    for name, extra in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("trackio",) * 2):
        with pytest.raises(ConfigError, match=rf"pip install 'etude\[{extra}\]'"):
            train({"name": name}, Counts())
    assert steps == []


def test_queueing_an_event_is_cheap():
    """A generous limit: about 2 µs are measured; a sink that wrote here would take far longer."""
    sink = Kept()
    sink.on_train_begin(
        etude.callbacks.RunInfo(
            "x", nn.Linear(1, 1), None, etude.Clock(), torch.device("cpu"), None, None, None, None
        )
    )
    begin = time.thread_time()
    for step in range(1000):
        sink.on_log({"step": step, "loss": 0.5})
    taken = time.thread_time() - begin
    sink.on_train_end({})
    assert taken < 0.1
    assert sum(isinstance(one, StepsLogged) for one in sink.events) == 1000
