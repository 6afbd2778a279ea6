"""A curriculum and the numbers of a run: metrics begin phases, records say the phase, callbacks compare within one."""

import logging

import pytest
import torch
from curriculum_runs import STEPS, Diary, Model, events, loader, run, tasks, trainer

from etude import Callback, EarlyStopping, Trainer
from etude.callbacks import LRSchedule, ModelCheckpoint
from etude.checkpoint.store import read_meta
from etude.core import Clock, TrainingError
from etude.engine.callback import RunInfo, RunParts
from etude.engine.callback_list import CallbackList
from etude.multitask import CurriculumCallback
from etude.multitask.curriculum import Phase, Ramp, Start
from run_files import records


def by_metric(values, curriculum, **config):
    """Run with validation numbers as given, one per epoch; return the diary."""
    diary, numbers = Diary(), iter(values)
    built = trainer(
        None, diary, curriculum=curriculum, **{"epochs": len(values), "validate_every_steps": None, **config}
    )
    built.evaluate = lambda: {"loss": next(numbers)}
    built.train()
    return diary


@pytest.mark.parametrize("bound", [{"below": 2.0}, {"above": 3.5}])
def test_a_metric_begins_a_phase_with_the_epoch_after_and_its_ramp_begins_there(bound):
    values = [3.0, float("nan"), 2.0, 9.0, 9.0] if "below" in bound else [3.0, float("inf"), 3.5, 0.0, 0.0]
    start = Start(metric="val_loss", **bound)
    diary = by_metric(values, [Phase("a", 1, ["first"]), Phase("b", start, ["first", "last"], Ramp(0.2, epochs=2))])
    assert diary.phases == [(0, "a", 1), (3 * STEPS, "b", 2)]
    assert "last" not in diary.steps[14]["weights"]
    assert [diary.steps[step]["weights"]["last"] for step in (15, 20)] == pytest.approx([0.5 * 0.2, 0.5 * 0.6])


def test_phases_whose_metrics_are_reached_at_once_begin_in_order_and_only_the_last_is_trained():
    low = Start(metric="val_loss", below=2.0)
    diary = by_metric([1.0, 1.0], [Phase("a", 1, ["first"]), Phase("b", low, ["last"]), Phase("c", low, "all")])
    assert diary.phases == [(0, "a", 1), (5, "b", 2), (5, "c", 3)]
    assert {found["phase"] for found in diary.steps.values()} == {1, 3}


def test_training_numbers_begin_phases_too_and_acc_is_accuracy():
    curriculum = [Phase("a", 1, ["first"]), Phase("b", Start(metric="loss", below=100.0), "all")]
    assert by_metric([1.0, 1.0], curriculum).phases[1] == (5, "b", 2)
    diary = Diary()
    built = trainer(
        None, diary, curriculum=[Phase("a", 1, ["first"]), Phase("b", Start(metric="val_acc", above=0.5), "all")],
        epochs=2, validate_every_steps=3,
    )  # fmt: skip
    built.evaluate = lambda: {"accuracy": 0.75}
    built.train()
    assert diary.phases[1] == (3, "b", 2)  # inside the epoch, with the step after the validation


def test_a_metric_that_is_not_reported_is_reported_once_with_those_that_are(caplog):
    with caplog.at_level(logging.WARNING, logger="etude"):
        by_metric([1.0, 1.0], [Phase("a", 1, ["first"]), Phase("b", Start(metric="val_los", below=1.0), "all")])
    (message,) = [record.message for record in caplog.records if "phase" in record.message]
    assert (
        message
        == "phase 'b' waits for 'val_los', which is not reported; did you mean 'val_loss'? (there are: phase, val_loss)"
    )


def test_a_phase_that_waits_for_a_validation_in_a_run_without_any_is_reported(caplog):
    built = trainer(None, curriculum=[Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1), "all")])
    without = Trainer(
        Model(), loader(), task=built.task, progress=False, config={"epochs": 1, "device": "cpu"},
        curriculum=[Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1), "all")],
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="etude"):
        without.train()
    assert "phase 'b' waits for 'val_loss', which is not reported" in caplog.text


def test_every_record_and_checkpoint_says_in_which_phase_it_was_measured(tmp_path):
    run(tmp_path, Diary(), keep_best=9).train()
    found = {(record["split"], record["step"]): record["phase"] for record in records(tmp_path)}
    assert found["epoch", 5] == found["val", 5] == 1.0  # measured before phase two began there
    assert (found["train", 6], found["val", 8], found["train", 9]) == (2.0, 2.0, 3.0)
    assert (found["epoch", 10], found["epoch", 15]) == (3.0, 4.0)
    phases_of = {
        int(path.name[5:]): read_meta(path)["metrics"]["phase"] for path in (tmp_path / "checkpoints").glob("step-*")
    }
    assert phases_of == {5: 1.0, 10: 3.0, 15: 4.0}


def test_an_epoch_without_validation_says_its_phase_too(tmp_path):
    run(tmp_path, Diary(), epochs=2, validate_interval=2, validate_every_steps=None).train()
    assert {record["step"]: record["phase"] for record in records(tmp_path) if record["split"] == "epoch"} == {
        5: 1,
        10: 3,
    }


def test_events_hold_all_that_a_phase_changes(tmp_path):
    run(tmp_path, Diary()).train()
    assert events(tmp_path)[1] == {
        "kind": "phase",
        "message": "phase 2 of 4, two: first, last (mean, new, weight 0.05); mixture a 1, b 3",
        "phase": "two",
        "number": 2,
        "phases": 4,
        "tasks": ["first", "last"],
        "new_tasks": ["last"],
        "weights": {"first": 1.0, "last": 0.05},
        "variants": {"last": "mean"},
        "mixture": {"a": 1, "b": 3},
        "sequence_length": None,
        "lr_scale": 1.0,
        "epoch": 1,
        "step": 5,
    }
    assert not events(tmp_path, "warning")


def test_the_display_shows_phases_and_without_one_they_are_logged_as_information(capsys, caplog):
    built = trainer(None, curriculum=[Phase("a", 1, ["first"]), Phase("b", 2, "all")], epochs=2)
    with caplog.at_level(logging.INFO, logger="etude"):
        built.train()
    assert [record.levelname for record in caplog.records if "phase 2 of 2, b" in record.message] == ["INFO"]
    shown = Trainer(
        Model(), loader(), task=tasks(), curriculum=[Phase("a", 1, ["first"]), Phase("b", Start(step=3), "all")],
        config={"epochs": 1, "device": "cpu"},
    )  # fmt: skip
    shown.train()
    assert "phase 1 of 2, a: first\n" in (output := capsys.readouterr().out)
    assert "phase 2 of 2, b: first, last (new, weight 0.05), mean (new, weight 0.2)" in output


def test_early_stopping_compares_only_within_a_phase():
    values = [1.0, 1.1, 5.0, 5.5, 5.2, 5.1]  # other tasks come in with epoch 3: their loss is no worse, it is another
    for curriculum, epochs in (([Phase("a", 1, ["first"]), Phase("b", 3, "all")], 5), ([Phase("a", 1, "all")], 3)):
        diary, stopping, numbers = Diary(), EarlyStopping(patience=2), iter(values)
        built = trainer(None, diary, curriculum=curriculum, callbacks=[stopping], epochs=6, validate_every_steps=None)
        built.evaluate = lambda numbers=numbers: {"loss": next(numbers)}
        built.train()
        assert (max(diary.steps) + 1) / STEPS == epochs
    assert stopping.monitored.best == 1.0


def test_a_phase_begun_by_the_last_numbers_is_not_compared_with_them():
    curriculum = [Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1.0), "all")]
    stopping = EarlyStopping(patience=2)
    built = trainer(None, curriculum=curriculum, callbacks=[stopping], epochs=3, validate_every_steps=None)
    numbers = iter([0.9, 5.0, 4.0])
    built.evaluate = lambda: {"loss": next(numbers)}
    built.train()
    assert (stopping.monitored.best, stopping.wait) == (4.0, 0)


def test_a_number_of_a_later_phase_may_be_monitored_and_one_of_none_is_an_error():
    curriculum = [Phase("a", 1, ["first"]), Phase("b", 3, "all")]
    stopping = EarlyStopping(monitor="val_mean/loss", patience=5)
    trainer(None, curriculum=curriculum, callbacks=[stopping], epochs=4).train()
    assert stopping.monitored.best_epoch in (2, 3)
    wrong = trainer(None, curriculum=curriculum, callbacks=[EarlyStopping(monitor="val_mea/loss")], epochs=4)
    with pytest.raises(TrainingError, match="did you mean 'val_mean/loss'"):
        wrong.train()


def test_waiting_for_a_later_phase_survives_a_resume(tmp_path):
    curriculum = [Phase("a", 1, ["first"]), Phase("b", 3, "all")]

    def build(diary):
        stopping = EarlyStopping(monitor="val_mean/loss", patience=5)
        return trainer(
            tmp_path, diary, curriculum=curriculum, callbacks=[stopping], epochs=4, validate_every_steps=None
        )

    build(Diary(stop_at=2)).train()
    resumed = build(Diary())
    resumed.load_checkpoint(tmp_path)
    resumed.train()


def test_model_checkpoint_keeps_the_best_epoch_of_the_last_phase(tmp_path):
    keeper, numbers = ModelCheckpoint(tmp_path / "best"), iter([1.0, 5.0, 4.0, 4.5])
    curriculum = [Phase("a", 1, ["first"]), Phase("b", 2, "all")]
    built = trainer(None, curriculum=curriculum, callbacks=[keeper], epochs=4, validate_every_steps=None)
    built.evaluate = lambda: {"loss": next(numbers)}
    built.train()
    assert (keeper.monitored.best, keeper.monitored.best_epoch) == (4.0, 2)


def test_a_plateau_begins_again_with_a_phase():
    numbers, rates = iter([1.0, 5.0, 5.5, 6.0]), []

    class Rates(Callback):
        def on_epoch_end(self, epoch, logs):
            rates.append(built.optimizer.param_groups[0]["lr"])

    built = trainer(
        None, curriculum=[Phase("a", 1, ["first"]), Phase("b", 2, "all")], epochs=4, validate_every_steps=None
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(built.optimizer, factor=0.5, patience=0)
    for callback in (LRSchedule(scheduler, monitor="val_loss"), Rates()):
        built.callbacks.append(callback)
    built.evaluate = lambda: {"loss": next(numbers)}
    built.train()
    assert rates == [0.01, 0.01, 0.005, 0.0025]


def test_the_best_checkpoint_is_one_of_the_newest_phase(tmp_path):
    numbers = iter([1.0, 0.5, 5.0, 4.0, 4.5])
    curriculum = [Phase("a", 1, ["first"]), Phase("b", 3, "all")]
    built = trainer(tmp_path, curriculum=curriculum, epochs=5, keep_best=2, validate_every_steps=None)
    built.evaluate = lambda: {"loss": next(numbers)}
    built.train()
    folder = tmp_path / "checkpoints"
    assert (folder / "best").resolve().name == "step-00000020"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000020", "step-00000025"]


def test_only_the_main_process_logs_phases(tmp_path, caplog):
    def messages(is_main):
        caplog.clear()
        model = Model()
        with caplog.at_level(logging.INFO, logger="etude"):
            listed = CallbackList([CurriculumCallback([Phase("a", 1, ["first"])])])
            listed.bind(RunParts(model, tasks()))
            optimizer = torch.optim.SGD(model.parameters())
            listed.on_train_begin(
                RunInfo("run", model, optimizer, Clock(), torch.device("cpu"), 1, 5, 5, tmp_path, is_main=is_main)
            )
            listed.on_epoch_begin(0)
            listed.on_step_begin(0)
        return [record.message for record in caplog.records]

    assert "phase 1 of 1, a" in messages(is_main=True)[0]
    assert not messages(is_main=False)
