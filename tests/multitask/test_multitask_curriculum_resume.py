"""A curriculum that is stopped anywhere and resumed, loaded or taken up is exactly the run it was."""

import pytest
import torch
from curriculum_runs import (
    ACCUMULATION,
    Diary,
    Model,
    Sequences,
    events,
    loader,
    run,
    tasks,
    trainer,
)

from etude import Callback, Trainer
from etude.core import CheckpointError
from etude.data import StreamLoader, Streams
from etude.multitask.curriculum import Phase
from run_files import records, weights

EVERY = [3, pytest.param(1, marks=pytest.mark.slow)]
"""Distance of the steps at which a run is ended."""


@pytest.mark.parametrize("distance", EVERY)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_stopped_after_any_step_and_resumed_it_is_the_same_run(tmp_path, accumulation, distance):
    whole = Diary()
    run(tmp_path / "whole", whole, accumulation).train()
    starts = {1: (0, 5, 8, 10), 3: (0, 2, 4, 5)}[accumulation]
    assert [(step, name) for step, name, _ in whole.phases] == list(
        zip(starts, ("one", "two", "three", "four"), strict=True)
    )
    total = max(whole.steps) + 1
    for stop in range(1, total, distance):
        folder, first, second = tmp_path / str(stop), Diary(stop_at=stop), Diary()
        run(folder, first, accumulation).train()
        torch.rand(stop)  # a new process has random generators in another state
        resumed = run(folder, second, accumulation)
        resumed.load_checkpoint(folder)
        resumed.train()
        assert first.steps | second.steps == whole.steps, stop
        assert first.phases + second.phases == whole.phases, stop  # each is said once
        assert weights(folder) == weights(tmp_path / "whole"), stop
        assert records(folder) == records(tmp_path / "whole"), stop
        assert events(folder) == events(tmp_path / "whole"), stop


@pytest.mark.parametrize("distance", EVERY)
@pytest.mark.parametrize("every", [3, 5])  # 5: right after the last step of an epoch, before its end
def test_broken_off_anywhere_phases_begin_again_and_are_on_record_once(tmp_path, every, distance):
    whole, config = Diary(), {"save_every_steps": every, "validate_every_steps": every}
    run(tmp_path / "whole", whole, **config).train()
    for broken in range(every + 1, max(whole.steps) + 1, distance):
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
    assert (loaded.state.clock.phase, loaded.learning_rate.scales) == (2, {"phase": 1.0})
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
        "there is no data for the active tasks, so nothing is measured"
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


def test_a_second_run_of_the_same_trainer_goes_on_and_a_new_one_begins_again(tmp_path):
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


def test_a_rate_that_a_phase_scales_is_not_one_that_a_schedule_has_left_behind(tmp_path, caplog):
    run(tmp_path, Diary(stop_at=9)).train()  # in phase three, which has an lr_scale
    resumed = run(tmp_path, Diary())
    resumed.load_checkpoint(tmp_path)
    caplog.clear()
    resumed.train()
    assert resumed.optimizer.param_groups[0]["initial_lr"] == 0.01
    assert not [record for record in caplog.records if "earlier schedule" in record.message]


def test_another_start_of_a_phase_that_has_begun_has_no_effect_and_says_so(tmp_path):
    for start in (2, 2, 3):
        one = trainer(tmp_path, Diary(stop_at=8), curriculum=[Phase("a", 1, ["first"]), Phase("b", start, ["first"])])
        if (tmp_path / "checkpoints" / "last").exists():
            one.load_checkpoint(tmp_path)
        one.train()
        assert ("'b' has begun already" in (tmp_path / "events.jsonl").read_text()) == (start == 3)
