"""The loop: order of its phases, what steers it, what it leaves behind, and what it costs when nobody listens."""

import json
import math
import signal

import pytest
import torch
from torch import nn

from etude import Callback, DataLoader, GradientAccumulator, Trainer
from etude.checkpoint.store import read_meta
from etude.core import ConfigError, DataError, TrainingError
from etude.engine.callback import HOOKS
from etude.engine.callback_list import CallbackList

SAMPLES, BATCH = 20, 8  # three steps per epoch


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def trainer(callbacks=(), *, validate=True, output_dir=None, x=None, **config):
    torch.manual_seed(0)
    features, labels = data()
    loader = DataLoader(features if x is None else x, labels, BATCH)
    return Trainer(
        nn.Linear(4, 2),
        loader,
        DataLoader(features, labels, BATCH, shuffle=False) if validate else None,
        config={"epochs": 2, "log_interval": 2, "device": "cpu", **config},
        callbacks=callbacks,
        output_dir=output_dir,
        progress=False,
    )


class Diary(Callback):
    """Writes down every hook as it comes."""

    def __init__(self):
        super().__init__()
        self.lines, self.logs = [], []

    def on_train_begin(self, run):
        self.lines.append(f"begin {run.total_steps}/{run.steps_per_epoch}")
        self.clock = run.clock

    def on_epoch_begin(self, epoch):
        self.lines.append(f"epoch {epoch}")

    def on_step_end(self, report):
        self.lines.append("step")

    def on_log(self, record):
        self.lines.append(f"log {record['step']}")
        self.logs.append(record)

    def on_validation_begin(self, epoch):
        self.lines.append("validate")

    def on_validation_end(self, epoch, metrics):
        self.lines.append(" ".join(sorted(metrics)))

    def on_epoch_end(self, epoch, logs):
        self.lines.append(f"end of epoch {epoch}")
        self.logs.append(logs)

    def on_checkpoint(self, path):
        self.lines.append(path.name)

    def on_train_end(self, result):
        self.lines.append("end")

    def on_exception(self, error):
        self.lines.append(type(error).__name__)


def test_hooks_come_in_the_stated_order(tmp_path):
    diary = Diary()
    trainer([diary], output_dir=tmp_path / "run", save_every_steps=4).train()
    validation = ["validate", "val_accuracy val_loss"]
    assert diary.lines == [
        "begin 6/3",
        "epoch 0",
        *["step", "step", "log 2", "step", *validation, "end of epoch 0", "step-00000003"],
        "epoch 1",
        *["step", "log 4", "step-00000004", "step", "step", "log 6", *validation, "end of epoch 1", "step-00000006"],
        "end",
    ]


def test_validation_after_every_so_many_steps(tmp_path):
    diary = Diary()
    trainer([diary], output_dir=tmp_path / "run", validate_every_steps=2, max_steps=4).train()
    validation = ["validate", "val_accuracy val_loss"]
    assert diary.lines == [
        "begin 4/3",
        "epoch 0",
        *["step", "step", "log 2", *validation, "step", *validation, "end of epoch 0", "step-00000003"],
        "epoch 1",
        *["step", "log 4", *validation, "step-00000004"],  # once, though the run ends here too
        "end",
    ]


def test_one_validation_where_an_epoch_ends_at_such_a_step():
    diary = Diary()
    trainer([diary], validate_every_steps=3).train()  # three steps per epoch
    assert diary.lines.count("validate") == 2
    assert all("val_loss" in logs for logs in diary.logs if "epoch_s" in logs)


def test_logged_numbers_are_those_of_the_steps():
    diary = Diary()
    losses = []

    class Losses(Callback):
        def on_step_end(self, report):
            losses.append((float(report.sums["loss"]), report.counts["loss"]))

    trainer([diary, Losses()]).train()
    first = diary.logs[0]
    assert first["loss"] == pytest.approx(sum(s for s, _ in losses[:2]) / sum(c for _, c in losses[:2]))
    epoch = next(logs for logs in diary.logs if "epoch_s" in logs)
    assert epoch["loss"] == pytest.approx(sum(s for s, _ in losses[:3]) / SAMPLES)
    assert 0 <= epoch["data_wait"] < 1
    assert epoch["samples_per_s"] > 0


def test_callbacks_run_in_the_listed_order_and_unused_hooks_cost_nothing():
    class First(Callback):
        def on_epoch_end(self, epoch, logs):
            order.append("first")

    class Second(Callback):
        def on_epoch_end(self, epoch, logs):
            order.append("second")

    order = []
    callbacks = CallbackList([First(), Second(), First()])
    callbacks.on_epoch_end(0, {})
    assert order == ["first", "second", "first"]
    assert {name: len(callbacks.hooks(name)) for name in HOOKS if callbacks.hooks(name)} == {"on_epoch_end": 3}


def test_control_saves_and_validates_between_steps(tmp_path):
    class Steer(Callback):
        step = 0

        def on_step_end(self, report):
            self.step += 1
            self.control.save = self.step == 1
            self.control.validate = self.step == 2

    diary = Diary()
    trainer([Steer(), diary], output_dir=tmp_path / "run", epochs=1, log_interval=100).train()
    assert diary.lines[2:8] == ["step", "step-00000001", "step", "validate", "val_accuracy val_loss", "step"]


def test_max_steps_ends_inside_an_epoch_with_validation_and_checkpoint(tmp_path):
    one = trainer(max_steps=4, epochs=None, output_dir=tmp_path / "run")
    result = one.train()
    assert (one.state.clock.step, one.state.clock.epoch, one.state.clock.position) == (4, 1, BATCH)
    assert {"val_loss", "lr"} <= result.keys()
    last = tmp_path / "run" / "checkpoints" / "last"
    assert read_meta(last)["metrics"]["val_loss"] == pytest.approx(result["val_loss"])


def test_checkpoints_inside_an_epoch_carry_no_stale_validation(tmp_path):
    trainer(output_dir=tmp_path / "run", save_every_steps=4, max_steps=5, keep_best=9).train()
    metrics = {path.name: read_meta(path)["metrics"] for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert {name for name, values in metrics.items() if "val_loss" in values} == {"step-00000003", "step-00000005"}
    assert "val_loss" not in metrics["step-00000004"]


def test_validate_and_checkpoint_intervals(tmp_path):
    diary = Diary()
    trainer([diary], output_dir=tmp_path / "run", epochs=5, validate_interval=2, checkpoint_interval=3).train()
    assert diary.lines.count("validate") == 3  # epochs 2, 4 and the last
    saved = [line for line in diary.lines if line.startswith("step-")]
    assert saved == ["step-00000009", "step-00000015"]


def test_without_checkpoints_nothing_is_saved(tmp_path):
    trainer(output_dir=tmp_path / "run", save_checkpoints=False).train()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("way", "kind", "level"), [("notice", "execution", "INFO"), ("warn", "warning", "WARNING")])
def test_how_steps_are_run_is_information_and_what_has_failed_a_warning(tmp_path, caplog, way, kind, level):
    class Says(Callback):
        def on_step_begin(self, step):
            if step == 1:
                getattr(one.step, way)("some words")

    one = trainer([Says()], output_dir=tmp_path)
    with caplog.at_level("INFO", "etude"):
        one.train()
    assert [record.levelname for record in caplog.records if record.getMessage() == "some words"] == [level]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["step"]) for event in events if event["message"] == "some words"] == [(kind, 1)]


def test_errors_reach_the_callbacks_and_the_caller():
    diary = Diary()

    class Broken(Callback):
        def on_epoch_end(self, epoch, logs):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer([diary, Broken()]).train()
    assert diary.lines[-1] == "RuntimeError"


def test_a_run_of_non_finite_updates_stops_with_the_weights_of_before():
    features, _ = data()
    one = trainer(x=features * math.nan, max_skipped_steps=2)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    with pytest.raises(TrainingError, match="not finite in the last 2 steps, up to step 2"):
        one.train()
    assert all(torch.equal(before[name], value) for name, value in one.model.state_dict().items())


def test_one_bad_batch_is_skipped_and_counted():
    features, _ = data()
    features = features.clone()
    features[3] = math.inf
    diary = Diary()
    trainer([diary], x=features, validate=False).train()
    assert [logs["skipped"] for logs in diary.logs if "epoch_s" in logs] == [1, 1]
    assert all(math.isfinite(logs["loss"]) for logs in diary.logs)


def test_signal_finishes_the_step_saves_and_names_itself(tmp_path):
    class Press(Callback):
        def on_step_end(self, report):
            if not self.control.stop:
                signal.raise_signal(signal.SIGINT)

    diary = Diary()
    one = trainer([Press(), diary], output_dir=tmp_path / "run")
    one.train()
    assert one.callbacks.control.reason == "SIGINT"
    assert one.state.clock.step == 1
    assert diary.lines[-2:] == ["step-00000001", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_signal_stops_at_once():
    class Press(Callback):
        def on_step_end(self, report):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        trainer([Press()]).train()


def test_empty_epochs_are_an_error():
    one = Trainer(nn.Linear(4, 2), [], config={"epochs": 1}, progress=False)
    with pytest.raises(DataError, match="no batch"):
        one.train()


def test_accumulation_schedules_are_checked():
    with pytest.raises(ConfigError, match="start at epoch 0"):
        GradientAccumulator(accumulation_steps={3: 2})
    with pytest.raises(ConfigError, match="accumulation_steps is 0"):
        GradientAccumulator(accumulation_steps=0)
    schedule = GradientAccumulator(accumulation_steps={0: 1, 2: 3})
    assert [schedule.steps_at(epoch) for epoch in range(4)] == [1, 1, 3, 3]
    assert schedule.num_steps(7, range(4)) == 7 + 7 + 3 + 3
