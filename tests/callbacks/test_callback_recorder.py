"""RunRecorder: what a run leaves in metrics.jsonl and events.jsonl."""

import json
from typing import Any

from callback_life import STEPS, Life

from etude.callbacks import Callback, CallbackList, EarlyStopping, RunRecorder
from etude.core import Clock, TrainingError
from etude.monitor import RunFolder


def read(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.events_path.read_text().splitlines()]


def events(folder: RunFolder) -> list[tuple[str, str]]:
    return [(e["kind"], e["message"]) for e in read(folder)]


def test_log_points_validations_and_epochs(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    Life(folder.path, total_epochs=3).whole(RunRecorder(folder))
    records = list(folder.read_metrics())
    assert [(r["split"], r["step"], r["epoch"]) for r in records] == [
        ("train", 2, 0), ("train", 4, 0), ("val", 4, 0), ("epoch", 4, 0),
        ("train", 6, 1), ("train", 8, 1), ("epoch", 8, 1),
        ("train", 10, 2), ("train", 12, 2), ("val", 12, 2), ("epoch", 12, 2),
    ]  # fmt: skip
    assert records[0]["loss"] == 0.5
    assert records[9]["val_loss"] is None
    assert records[9]["nonfinite"] == ["val_loss"]
    assert all(r["time"] > 1.6e9 for r in records)


def test_events_of_a_run_that_ends_and_one_that_stops_early(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    Life(folder.path, total_epochs=1).whole(RunRecorder(folder))
    assert events(folder) == [("start", "life started"), ("checkpoint", "saved step-00000004"), ("end", "finished")]
    folder = RunFolder.create(tmp_path / "early")
    Life(folder.path).whole(RunRecorder(folder), EarlyStopping("loss", patience=0, min_delta=0.4))
    assert events(folder)[-1] == ("end", "loss has not improved for 1 epoch (best 0.5 in epoch 2)")


def test_errors_and_interrupts_are_distinguished(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    life = Life(folder.path, clock=Clock(step=STEPS, epoch=1), resumed=True)
    callbacks = CallbackList([RunRecorder(folder)])
    callbacks.on_train_begin(life.run_info())
    callbacks.on_exception(TrainingError("the loss is not finite"))
    callbacks.on_exception(KeyboardInterrupt())
    assert events(folder) == [
        ("resume", "life resumed at step 4"),
        ("end", "TrainingError: the loss is not finite"),
        ("end", "KeyboardInterrupt"),
    ]
    assert [e.get("status") for e in read(folder)] == [None, "failed", "interrupted"]


def test_a_record_made_again_after_a_resume_is_written_once(tmp_path):
    """A checkpoint inside the last step of an epoch, killed after that epoch's validation: it is validated twice."""
    folder = RunFolder.create(tmp_path / "run")
    life = Life(folder.path)
    callbacks = CallbackList([RunRecorder(folder)])
    callbacks.on_train_begin(life.run_info())
    life.epoch(callbacks)
    folder.trim(4)
    again = CallbackList([RunRecorder(folder)])
    again.on_train_begin(Life(folder.path, clock=Clock(step=4, epoch=0, position=32), resumed=True).run_info())
    again.on_epoch_begin(0)
    again.on_validation_end(0, {"val_loss": 1.5})
    again.on_epoch_end(0, {"loss": 1.0})
    assert [r["split"] for r in folder.read_metrics()] == ["train", "train", "val", "epoch"]


def test_work_that_is_done_again_is_recorded_once(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    life = Life(folder.path)
    recorder = RunRecorder(folder)
    callbacks = CallbackList([recorder])
    callbacks.on_train_begin(life.run_info())
    for _ in range(3):
        life.epoch(callbacks)
    for clock, steps in ((Clock(step=6, epoch=1, position=16), [2, 4, 6]), (Clock(), [])):  # go on at 6; begin again
        callbacks.on_train_begin(Life(folder.path, clock=clock, resumed=clock.step > 0).run_info())
        callbacks.on_log({"step": 99, "loss": 1.0})
        assert [r["step"] for r in folder.read_metrics() if r["split"] == "train"] == [*steps, 99]


def test_a_folder_that_vanishes_does_not_end_the_run(tmp_path, caplog):
    folder = RunFolder(tmp_path / "gone")
    Life(folder.path, total_epochs=2).whole(RunRecorder(folder))
    assert caplog.text.count("training continues") == 2  # metrics.jsonl, events.jsonl: once each


def test_control_is_shared_with_the_recorder(tmp_path):
    class Stop(Callback):
        def on_epoch_end(self, epoch, logs):
            self.control.request_stop("enough")

    folder = RunFolder.create(tmp_path / "run")
    Life(folder.path).whole(Stop(), RunRecorder(folder))
    assert events(folder)[-1] == ("end", "enough")
