"""Typed events: what subscribers receive, and that records of the run folder read back as the same events."""

from dataclasses import asdict, fields

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import etude
from etude.callbacks import Callback, Telemetry
from etude.monitor import (
    CheckpointSaved,
    EpochEnded,
    EpochStarted,
    MediaLogged,
    Noted,
    PhaseStarted,
    Recovered,
    RunEnded,
    RunStarted,
    StepsLogged,
    Validated,
    Warned,
)
from etude.monitor.events import Event, record_of
from etude.monitor.jsonl import decode, encode

DATA = (torch.randn(32, 4), torch.randint(0, 3, (32,)))
SETTINGS = {"batch_size": 8, "log_interval": 2, "device": "cpu"}


def train(*callbacks: Callback, epochs: int = 2, **kwargs):
    config = etude.TrainerConfig(epochs=epochs, **SETTINGS)
    trainer = etude.Trainer(nn.Linear(4, 3), DATA, DATA, config=config, callbacks=list(callbacks), **kwargs)
    trainer.train()
    return trainer


def test_a_subscriber_receives_the_run_in_order(tmp_path):
    events: list[Event] = []
    train(Telemetry(events.append), output_dir=tmp_path / "run", metrics=["confusion_matrix"])
    kinds = [type(one) for one in events if not isinstance(one, Noted)]
    epoch = [EpochStarted, StepsLogged, StepsLogged, Validated, MediaLogged, EpochEnded, CheckpointSaved]
    assert kinds == [RunStarted, *epoch, *epoch, RunEnded]
    start, end = events[0], events[-1]
    assert isinstance(start, RunStarted)
    assert (start.total_steps, start.total_epochs, start.steps_per_epoch, start.parameters) == (8, 2, 4, 15)
    assert isinstance(end, RunEnded)
    assert (end.status, end.step) == ("finished", 8)
    matrix = next(one for one in events if isinstance(one, MediaLogged))
    assert sum(map(sum, matrix.data["matrix"])) == 32
    assert [one.time for one in events] == sorted(one.time for one in events)


def test_only_the_kinds_that_are_asked_for():
    events: list[Event] = []
    train(Telemetry(events.append, kinds=[Validated]))
    assert [(type(one), one.step) for one in events] == [(Validated, 4), (Validated, 8)]


def test_a_function_that_fails_is_reported_once_and_the_run_goes_on(caplog):
    calls = []

    def fail(event: Event) -> None:
        calls.append(event)
        raise OSError("the network is gone")

    assert train(Telemetry(fail)).state.clock.step == 8
    assert len(calls) == 1
    assert caplog.text.count("the network is gone") == 1


def test_skipped_updates_are_a_recovery():
    class Spoil(Callback):
        def on_gradients(self, gradients):
            if self.steps == 1:
                gradients.params[0].grad.fill_(float("nan"))
            self.steps += 1

        steps = 0

    events: list[Event] = []
    train(Spoil(), Telemetry(events.append, kinds=[Recovered]), epochs=1)
    assert [(one.step, one.facts) for one in events] == [(2, {"skipped": 1})]


def test_what_a_callback_publishes_reaches_others(tmp_path):
    class Writer(Callback):
        def on_epoch_end(self, epoch, logs):
            self.publish("sample", "text", f"once upon {epoch}")

    events: list[Event] = []
    train(Writer(), Telemetry(events.append, kinds=[MediaLogged]), output_dir=tmp_path / "run")
    assert [(one.step, one.data) for one in events] == [(4, "once upon 0"), (8, "once upon 1")]
    lines = (tmp_path / "run/media.jsonl").read_text().splitlines()
    assert [decode(line)["data"] for line in lines] == ["once upon 0", "once upon 1"]


numbers = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name not in ("step", "epoch", "split", "time", "kind", "nonfinite")),
    st.floats(allow_nan=False, allow_infinity=False),
    max_size=3,
)
place = {"time": st.floats(1, 1e10), "step": st.integers(0, 10**9), "epoch": st.integers(0, 10**6)}
facts = st.dictionaries(st.sampled_from(["layers", "phase", "tasks", "norms"]), st.text(), max_size=2)
EVENTS = st.one_of(
    st.builds(StepsLogged, **place, metrics=numbers),
    st.builds(Validated, **place, metrics=numbers),
    st.builds(EpochEnded, **place, metrics=numbers),
    st.builds(Warned, **place, message=st.text(), facts=facts),
    st.builds(Recovered, **place, message=st.text(), facts=facts),
    st.builds(PhaseStarted, **place, message=st.text(), facts=facts),
    st.builds(Noted, **place, message=st.text(), facts=facts, topic=st.sampled_from(["execution", "restore", "own"])),
    st.builds(CheckpointSaved, **place, message=st.text(), path=st.text()),
    st.builds(MediaLogged, **place, name=st.text(), media=st.just("text"), data=st.text()),
    st.builds(RunEnded, **place, status=st.just("failed"), message=st.text(), metrics=numbers),
    st.builds(RunStarted, **place, message=st.text(), name=st.text(), resumed=st.booleans(), total_steps=st.none()),
)


@given(EVENTS)
def test_a_record_holds_everything_that_its_event_says(event):
    record, own = decode(encode(record_of(event))), asdict(event)
    inside = own.pop("metrics" if "split" in record else "facts", {})
    assert {key: record[key] for key in inside} == inside
    kind = own.pop("topic", "resume" if own.get("resumed") else event.kind)
    assert record.get("kind", kind) == kind
    assert {key: record[key] for key in own} == own


@pytest.mark.parametrize("kind", [RunStarted, StepsLogged, Warned, MediaLogged, RunEnded])
def test_every_event_knows_its_time_step_and_epoch(kind):
    assert [one.name for one in fields(kind)][:3] == ["time", "step", "epoch"]
