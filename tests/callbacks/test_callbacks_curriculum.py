"""A curriculum in a run: what is active in every step, resumed anywhere exactly, reported once, checked early."""

import json
import logging

import pytest
import torch
from callback_life import Life
from curriculum_runs import (
    STEPS,
    Diary,
    Model,
    Sequences,
    events,
    loader,
    phases,
    records,
    tasks,
    trainer,
    weights,
)
from torch import nn

from etude import Callback, EarlyStopping, Trainer
from etude.callbacks import LRSchedule, ModelCheckpoint
from etude.checkpoint import read_meta
from etude.core import CheckpointError, ConfigError, DataError, TrainingError
from etude.data import StreamLoader, Streams
from etude.engine.callback import CallbackList
from etude.multitask import CurriculumCallback
from etude.multitask.curriculum import Curriculum, CurriculumState, Phase, Ramp, Start
from etude.optim import SGD, AdamW
from etude.trainer.loaders import DeviceLoader

ACCUMULATION = {1: {"step": 8, "epochs": 3}, 3: {"step": 4, "epochs": 5, "validate_every_steps": 5}}
"""By micro-batches per step: phase three begins inside an epoch or with one, and four with one or inside."""


def run(folder, diary, accumulation=1, **config):
    config = {"grad_accum_steps": accumulation, **ACCUMULATION[accumulation], **config}
    return trainer(folder, diary, curriculum=phases(config.pop("step")), **config)


# --- what is active


def test_every_step_has_the_phase_the_weights_the_data_and_the_rate_of_its_moment():
    diary = Diary()
    run(None, diary).train()
    assert diary.phases == [(0, "one", 1), (5, "two", 2), (8, "three", 3), (10, "four", 4)]
    for step, found in diary.steps.items():
        epoch = step // STEPS + 1
        last = 0.5 * min(1.0, 0.1 + 0.9 * (epoch - 2) / 2)  # came in with epoch 2, over two epochs
        mean = 2.0 * min(1.0, (step - 8) / 4)  # came in with step 8, from 0 over four steps
        first = min(1.0, 0.5 + 0.5 * (step - 10) / 3)  # was away in phase three, and came back with step 10
        number, expected, shares, length, lr = (
            (1, {"first": 1.0}, {"a": 1.0}, 4, 0.01)
            if step < 5
            else (2, {"first": 1.0, "last": last}, {"a": 0.25, "b": 0.75}, None, 0.01)
            if step < 8
            else (3, {"last": last, "mean": mean}, {"a": 0.5, "b": 0.5}, 3, 0.005)
            if step < 10
            else (4, {"first": first, "last": last, "mean": mean}, {"a": 0.5, "b": 0.5}, None, 0.01)
        )
        assert found["phase"] == number, step
        assert found["weights"] == pytest.approx(expected), step
        assert dict(found["mixture"].shares) == shares, step
        assert found["mixture"].sequence_length == length, step
        assert found["lr"] == pytest.approx(lr), step
        assert (found["epoch"], found["position"]) == (epoch - 1, 4 * (step % STEPS + 1))


def test_batches_are_those_of_the_phase_and_resting_heads_do_not_run():
    seen, calls = [], {}

    class Watched(Model):
        def forward(self, batch, heads):
            if self.training:
                seen.append((batch["stream"], tuple(heads), batch["input_ids"].shape[1]))
            return super().forward(batch, heads)

    built = run(None, Diary())
    built.model.__class__ = Watched
    for name, head in built.model.heads.items():
        head.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls.get(name, 0) + 1))
    built.train()
    assert seen[:5] == [("a", ("first",), 4)] * 5
    assert all(
        (stream, heads) in {("a", ("first",)), ("b", ("mean",))} for stream, heads, _ in seen[5:8]
    )  # a variant
    assert all(
        (stream, heads, length) in {("b", ("last",), 3), ("a", ("mean",), 3)} for stream, heads, length in seen[8:10]
    )
    assert all(heads == (("first", "mean") if stream == "a" else ("last",)) for stream, heads, _ in seen[10:])
    assert set(calls) == {"first", "last", "mean"}


@pytest.mark.parametrize(
    ("curriculum", "listens"),
    [
        ([Phase("a", 1, ["first"]), Phase("b", 2, "all")], False),
        ([Phase("a", 1, ["first"], Ramp(steps=5)), Phase("b", 2, "all")], False),  # the first phase has no ramp
        ([Phase("a", 1, ["first"]), Phase("b", 2, "all", Ramp(steps=5))], True),
        ([Phase("a", 1, ["first"]), Phase("b", Start(step=3), "all")], True),
        ([Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1.0), "all")], True),
    ],
)
def test_steps_cost_nothing_unless_something_can_change_between_them(curriculum, listens):
    callback = CurriculumCallback(Curriculum(curriculum, tasks().tasks.keys()), tasks())
    listed = CallbackList([callback])
    assert bool(listed.hooks("on_step_begin")) == listens
    assert not listed.hooks("on_step_end")


@pytest.mark.parametrize("given", ["phases", "curriculum"])
def test_curriculum_of_a_trainer_is_short_for_the_callback(given):
    """Task, streams and learning rate, which the callback was not given, are those of the run."""
    short, long = Diary(), Diary()
    run(None, short).train()
    made = phases(ACCUMULATION[1]["step"])
    made = made if given == "phases" else Curriculum(made, {name: one.weight for name, one in tasks().tasks.items()})
    long.loader, long.task = loader(), tasks()
    Trainer(
        Model(), long.loader, loader(training=False, shuffle=False, weights=None, epoch_samples=None), task=long.task,
        callbacks=[CurriculumCallback(made), long], optimizer=lambda params: AdamW(params, lr=0.01), progress=False,
        config={"epochs": ACCUMULATION[1]["epochs"], "log_interval": 3, "device": "cpu", "validate_every_steps": 4},
    ).train()  # fmt: skip
    assert long.steps == short.steps
    assert long.phases == short.phases


# --- exactness


@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_stopped_after_any_step_and_resumed_it_is_the_same_run(tmp_path, accumulation):
    whole = Diary()
    run(tmp_path / "whole", whole, accumulation).train()
    starts = {1: (0, 5, 8, 10), 3: (0, 2, 4, 5)}[accumulation]
    assert [(step, name) for step, name, _ in whole.phases] == list(
        zip(starts, ("one", "two", "three", "four"), strict=True)
    )
    total = max(whole.steps) + 1
    for stop in range(1, total):
        folder, first, second = tmp_path / str(stop), Diary(stop_at=stop), Diary()
        run(folder, first, accumulation).train()
        torch.rand(stop)  # a new process has random generators in another state
        resumed = run(folder, second, accumulation)
        resumed.load_checkpoint(folder)
        resumed.train()
        assert first.steps | second.steps == whole.steps, stop
        assert first.phases + second.phases == whole.phases, stop  # each told once
        assert weights(folder) == weights(tmp_path / "whole"), stop
        assert records(folder) == records(tmp_path / "whole"), stop
        assert events(folder) == events(tmp_path / "whole"), stop


@pytest.mark.parametrize("every", [3, 5])  # 5: right after the last step of an epoch, before its end
def test_broken_off_anywhere_phases_begin_again_and_are_on_record_once(tmp_path, every):
    whole, config = Diary(), {"save_every_steps": every, "validate_every_steps": every}
    run(tmp_path / "whole", whole, **config).train()
    for broken in range(every + 1, max(whole.steps) + 1):
        folder, second = tmp_path / f"broken-{broken}", Diary()
        with pytest.raises(ArithmeticError):
            run(folder, Diary(break_at=broken), **config).train()
        resumed = run(folder, second, **config)
        resumed.load_checkpoint(folder)
        at = resumed.state.clock.step
        resumed.train()
        assert second.steps == {step: found for step, found in whole.steps.items() if step >= at}, broken
        assert weights(folder) == weights(tmp_path / "whole"), broken
        assert events(folder) == events(tmp_path / "whole"), broken
        assert records(folder) == records(tmp_path / "whole"), broken


def test_stopped_after_the_last_step_of_an_epoch_it_ends_the_epoch_in_the_phase_it_was_in(tmp_path):
    config = {"validate_every_steps": 5}  # the validation after step 10 begins phase four
    run(tmp_path / "whole", whole := Diary(), **config).train()
    run(tmp_path / "stopped", Diary(stop_at=10), **config).train()
    resumed = run(tmp_path / "stopped", second := Diary(), **config)
    resumed.load_checkpoint(tmp_path / "stopped")
    resumed.train()
    assert second.phases == whole.phases[3:] == [(10, "four", 4)]
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_loaded_checkpoint_is_evaluated_with_the_tasks_of_its_phase(tmp_path):
    run(tmp_path, Diary(stop_at=7)).train()
    loaded = run(tmp_path, Diary())
    loaded.load_checkpoint(tmp_path)
    assert set(loaded.task.weights) == {"first", "last"}
    assert (loaded.state.clock.phase, loaded.learning_rate.scale) == (2, 1.0)
    numbers = loaded.evaluate()
    assert "last/loss" in numbers
    assert "mean/loss" not in numbers


def test_a_phase_without_validation_data_goes_on_and_says_so(caplog):
    """Early phases often have none; those after them do."""
    val_loader = StreamLoader(Streams({"a": Sequences(3)}, absent=frozenset({"b"})), 4, training=False)
    seen, curriculum = {}, [Phase("one", 1, ["last"]), Phase("two", 2, ["first", "last"])]

    class Ends(Callback):
        def on_epoch_end(self, epoch, logs):
            seen[epoch] = {name for name in logs if name.startswith("val_")}

    Trainer(
        Model(), loader(), val_loader, task=tasks(), curriculum=curriculum, callbacks=[Ends()], progress=False,
        config={"epochs": 2, "device": "cpu"},
    ).train()  # fmt: skip
    assert seen == {0: set(), 1: {"val_loss", "val_first/loss", "val_first/accuracy"}}
    assert [record.message for record in caplog.records if "no data" in record.message] == [
        "there is no data here for the tasks that are trained now, so nothing is measured"
    ]


def test_a_run_begun_without_a_curriculum_takes_one_up(tmp_path):
    first = Trainer(
        Model(), loader(), config={"epochs": 4, "device": "cpu"}, task=tasks(), output_dir=tmp_path, progress=False,
        callbacks=[stopper := Diary(stop_at=7)],
    )  # fmt: skip
    stopper.task, stopper.loader = first.task, first.loaders.train
    first.train()
    diary = Diary()
    second = trainer(tmp_path, diary)
    second.load_checkpoint(tmp_path)
    second.train()
    assert [(step, name) for step, name, _ in diary.phases] == [(7, "one"), (7, "two"), (8, "three"), (10, "four")]


def test_a_second_run_of_the_same_trainer_goes_on_and_a_new_one_begins_anew(tmp_path):
    diary = Diary()
    built = run(tmp_path, diary, epochs=1)
    built.train()
    built.train(num_epochs=2)
    assert [name for _, name, _ in diary.phases] == ["one", "two", "three"]
    again = Diary()
    run(tmp_path, again, epochs=1, overwrite=True).train()
    assert [name for _, name, _ in again.phases] == ["one"]
    assert [event["phase"] for event in events(tmp_path)] == ["one"]


def test_a_phase_that_is_gone_from_the_curriculum_is_named(tmp_path):
    run(tmp_path, Diary(stop_at=7)).train()
    other = trainer(tmp_path, curriculum=[Phase("other", 1, ["first"])])
    with pytest.raises(CheckpointError, match=r"in phase 'one', which is not defined \(there are: other\)"):
        other.load_checkpoint(tmp_path)


# --- metrics that begin phases


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


def test_a_metric_that_is_not_reported_is_told_once_with_those_that_are(caplog):
    with caplog.at_level(logging.WARNING, logger="etude"):
        by_metric([1.0, 1.0], [Phase("a", 1, ["first"]), Phase("b", Start(metric="val_los", below=1.0), "all")])
    (message,) = [record.message for record in caplog.records if "phase" in record.message]
    assert (
        message
        == "phase 'b' waits for 'val_los', which is not reported; did you mean 'val_loss'? (there are: phase, val_loss)"
    )


def test_a_phase_that_waits_for_a_validation_in_a_run_without_any_is_told(caplog):
    built = trainer(None, curriculum=[Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1), "all")])
    without = Trainer(
        Model(), loader(), task=built.task, progress=False, config={"epochs": 1, "device": "cpu"},
        curriculum=[Phase("a", 1, ["first"]), Phase("b", Start(metric="val_loss", below=1), "all")],
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="etude"):
        without.train()
    assert "phase 'b' waits for 'val_loss', which is not reported" in caplog.text


# --- telling


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


# --- callbacks that compare


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


def test_a_plateau_begins_anew_with_a_phase():
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


# --- mistakes


def started(curriculum, **arguments):
    """Begin a run that must not take a step."""

    class NoStep(Callback):
        def on_step_end(self, report):
            raise AssertionError("a step was taken")

    trainer(None, curriculum=curriculum, callbacks=[NoStep()], **arguments).train()


@pytest.mark.parametrize(
    ("late", "error", "words"),
    [
        ({"mixture": {"a": 1, "x": 1}}, DataError, "phase 'late': .*'x'"),
        ({"mixture": {"b": 1}, "tasks": ["first"]}, DataError, "phase 'late': "),
        ({"sequence_length": 7}, DataError, "phase 'late': sequence_length 7 is more than the 6 tokens"),
        ({"variants": {"last": "full"}}, ConfigError, "phase 'late': the task 'last' has no variant 'full'"),
    ],
)
def test_what_a_late_phase_cannot_do_is_said_before_the_first_step(late, error, words):
    with pytest.raises(error, match=words):
        started([Phase("a", 1, ["first"]), Phase("late", 3, **{"tasks": "all"} | late)])


@pytest.mark.parametrize("setting", [{"mixture": {"a": 1.0}}, {"sequence_length": 4}])
def test_data_without_streams_cannot_follow_a_mixture_or_a_length(setting):
    batches = list(loader().iterate(0))
    with pytest.raises(
        ConfigError, match=f"phase 'late' sets {next(iter(setting))}, but the training data has no streams"
    ):
        started([Phase("a", 1, ["first"]), Phase("late", 3, "all", **setting)], data=batches)


def test_a_rate_that_a_torch_scheduler_sets_cannot_be_scaled():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=0.1)
    model = Model()
    optimizer.add_param_group({"params": list(model.parameters())})
    built = Trainer(
        model, loader(), task=tasks(), optimizer=optimizer, config={"device": "cpu"}, progress=False,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3),
        curriculum=[Phase("a", 1, ["first"]), Phase("late", 2, "all", lr_scale=0.5)],
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"phase 'late' has lr_scale 0.5, but a torch scheduler sets the learning rate"
    ):
        built.train()


def test_a_curriculum_needs_several_tasks():
    x = torch.zeros(8, 3)
    with pytest.raises(
        ConfigError, match=r"several tasks, and SupervisedTask is one; give the Trainer task=MultiTask"
    ):
        Trainer(nn.Linear(3, 2), (x, x[:, 0].long()), curriculum=[Phase("a", 1, ["first"])], progress=False)


def test_a_task_that_is_not_defined_is_named():
    with pytest.raises(
        ConfigError, match="phase 'a' names the task 'frist', which is not defined; did you mean 'first'"
    ):
        trainer(None, curriculum=[Phase("a", 1, ["frist"])])


# --- doors


def test_phases_alone_take_the_weights_of_the_tasks_and_a_curriculum_brings_its_own():
    diary = Diary()
    trainer(None, diary, curriculum=[Phase("a", 1, "all")], epochs=1).train()
    assert diary.steps[0]["weights"] == {"first": 1.0, "last": 0.5, "mean": 2.0}
    trainer(None, diary, curriculum=Curriculum([Phase("a", 1, ["last"])], {"last": 7.0}), epochs=1).train()
    assert diary.steps[0]["weights"] == {"last": 7.0}


def test_batches_that_can_be_read_only_once_are_read_on_through_phases():
    batches = (batch for epoch in range(3) for batch in loader(weights={"a": 1, "b": 0}).iterate(epoch))
    diary = Diary()
    source = tasks()
    curriculum = [Phase("a", 1, ["first"]), Phase("b", Start(step=4), "all", Ramp(steps=3))]
    built = Trainer(
        Model(), batches, task=source, curriculum=curriculum, config={"epochs": 1, "device": "cpu"}, progress=False,
        callbacks=[diary],
    )  # fmt: skip
    diary.task, diary.loader = source, loader()
    built.train()
    assert diary.phases == [(0, "a", 1), (4, "b", 2)]
    assert len(diary.steps) == 15


def test_a_loader_whose_batches_are_moved_to_a_device_still_chooses():
    inner = loader()
    trainer(
        None, curriculum=[Phase("a", 1, ["last"])], data=DeviceLoader(inner, torch.device("cpu")), epochs=1
    ).train()
    assert dict(inner.mixture.shares) == {"b": 1.0}


def test_state_is_plain_data_and_goes_back():
    curriculum = Curriculum(phases(), ["first", "last", "mean"])
    callback = CurriculumCallback(curriculum, tasks(), loader())
    listed = CallbackList([callback])
    for epoch in range(3):
        listed.on_epoch_begin(epoch)
        listed.on_step_begin(0)
    state = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
    other, task = CurriculumCallback(curriculum, again := tasks(), loader()), callback.task
    other.load_state_dict(state)
    assert other.state == callback.state != CurriculumState()
    assert again.weights == task.weights
    assert other.state_dict() == callback.state_dict()


def test_only_the_main_process_tells(tmp_path, caplog):
    curriculum = Curriculum([Phase("a", 1, ["first"])], ["first", "last", "mean"])
    with caplog.at_level(logging.INFO, logger="etude"):
        Life(tmp_path, is_main=False).whole(CurriculumCallback(curriculum, tasks()))
    assert not caplog.records
