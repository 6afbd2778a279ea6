"""One folder is one run: what a trainer does with an output_dir that is free, used, or used by somebody else."""

import shutil

import pytest
from output_runs import STEPS, Fail, files, trainer
from torch import nn

from etude import Callback, Trainer
from etude.core import CheckpointError, ConfigError, RunFolderError
from etude.monitor import RunFolder
from forked_python import run_python
from run_files import weights


@pytest.mark.parametrize("write", [lambda one: one.train(), lambda one: one.save_checkpoint()], ids=["train", "save"])
def test_a_used_folder_is_refused_and_left_as_it_is(tmp_path, write):
    trainer(tmp_path).train()
    before = files(tmp_path)
    second = trainer(tmp_path, lr=0.5)
    with pytest.raises(RunFolderError) as caught:
        write(second)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "resume=True" in message
    assert "overwrite=True" in message
    assert "\n" not in message
    assert files(tmp_path) == before
    assert second.evaluate()["loss"] > 0  # looking is allowed


def test_overwrite_gives_the_folder_of_a_new_run(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    trainer(old, config={"epochs": 4}).train()
    (old / "notes.txt").write_text("mine")
    (old / "checkpoints" / "mine").mkdir()
    (old / "checkpoints" / "step-00000010-mine").mkdir()
    one = trainer(old, lr=0.5, overwrite=True)
    assert (old / "checkpoints" / f"step-{4 * STEPS:08d}").is_dir()  # nothing happens before training starts
    one.train()
    trainer(new, lr=0.5).train()
    assert weights(old) == weights(new)
    names = {name for name in files(old) if name != "notes.txt"}
    assert names == set(files(new))
    assert (old / "notes.txt").read_text() == "mine"
    assert (old / "checkpoints" / "mine").is_dir()
    assert (old / "checkpoints" / "step-00000010-mine").is_dir()
    assert one.train(num_epochs=3)  # and now it is a run of its own
    assert (old / "checkpoints" / "last").resolve().name == f"step-{3 * STEPS:08d}"


def test_a_script_with_resume_can_simply_be_started_again(tmp_path):
    straight = tmp_path / "straight"
    trainer(straight).train()
    folder = tmp_path / "restarted"
    for step in (1, 2, STEPS + 1):  # twice before the first checkpoint, once after it
        one = trainer(folder, callbacks=[Fail(step)], resume=True)
        with pytest.raises(RuntimeError, match="boom"):
            one.train()
    last = trainer(folder, resume=True)
    assert last.state.clock.step == STEPS
    result = last.train()
    assert weights(folder) == weights(straight)
    again = trainer(folder, resume=True)
    numbers = again.train()  # nothing is left to train
    assert numbers["val_loss"] == result["val_loss"]


def test_loading_a_checkpoint_of_the_folder_is_a_wish_to_go_on(tmp_path):
    trainer(tmp_path, config={"epochs": 1}).train()
    one = trainer(tmp_path)
    one.load_checkpoint(tmp_path)
    one.train()
    assert one.state.clock.step == 2 * STEPS
    one.train(num_epochs=3)  # and goes on once more
    assert one.state.clock.step == 3 * STEPS


def test_loading_a_checkpoint_from_elsewhere_is_not(tmp_path):
    trainer(tmp_path / "a", config={"epochs": 1}).train()
    trainer(tmp_path / "b", config={"epochs": 1}).train()
    one = trainer(tmp_path / "b")
    one.load_checkpoint(tmp_path / "a")
    with pytest.raises(RunFolderError, match="resume=True"):
        one.train()
    branch = trainer(tmp_path / "c")
    branch.load_checkpoint(tmp_path / "a")
    branch.train()
    assert branch.state.clock.step == 2 * STEPS


def test_an_older_checkpoint_does_not_go_on_among_newer_ones(tmp_path):
    trainer(tmp_path, config={"keep_best": 9}).train()
    older, newest = (tmp_path / "checkpoints" / f"step-{step:08d}" for step in (STEPS, 2 * STEPS))
    one = trainer(tmp_path)
    one.load_checkpoint(older)
    with pytest.raises(RunFolderError, match=rf"step {2 * STEPS}.*step {STEPS}"):
        one.train()
    (newest / "model.safetensors").write_bytes(b"damaged")  # a damaged one is nothing to lose
    two = trainer(tmp_path, resume=True)
    assert two.state.clock.step == STEPS
    two.train()


@pytest.mark.parametrize("left", ["nothing", "first step fails"])
def test_a_run_that_got_nowhere_does_not_block_the_next(tmp_path, left):
    if left == "first step fails":
        with pytest.raises(RuntimeError, match="boom"):
            trainer(tmp_path, callbacks=[Fail(0)]).train()
    else:
        trainer(tmp_path)
    trainer(tmp_path).train()
    assert weights(tmp_path)


def test_a_folder_without_checkpoints_but_with_finished_steps_is_used(tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, callbacks=[Fail(2)]).train()
    assert not list((tmp_path / "checkpoints").iterdir())
    with pytest.raises(RunFolderError, match="overwrite=True"):
        trainer(tmp_path).train()
    trainer(tmp_path, config={"save_checkpoints": False}, overwrite=True).train()
    with pytest.raises(RunFolderError, match="overwrite=True"):
        trainer(tmp_path).train()


def test_two_trainers_made_for_one_folder(tmp_path):
    first, second = trainer(tmp_path), trainer(tmp_path)
    first.train()
    with pytest.raises(RunFolderError, match="already holds a run"):
        second.train()
    third = trainer(tmp_path, resume=True)
    third.train(num_epochs=9)
    before = files(tmp_path)
    with pytest.raises(RunFolderError, match="holds a checkpoint of step"):  # the other has got further
        first.train(num_epochs=3)
    assert files(tmp_path) == before


OVERWRITE = """
import sys
from etude import Trainer
from torch import nn, zeros
Trainer(nn.Linear(2, 1), (zeros(4, 2), zeros(4, 1)), output_dir=sys.argv[1], overwrite=True, progress=False,
        config={"epochs": 1, "device": "cpu"}).train()
"""


def test_overwrite_waits_for_no_lock_and_takes_nothing_from_a_running_process(tmp_path):
    class Rival(Callback):
        result = None

        def on_epoch_end(self, epoch, logs):
            if epoch == 1:
                self.result = run_python("-c", OVERWRITE, tmp_path)
                self.left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    rival = Rival()
    trainer(tmp_path, callbacks=[rival]).train()
    assert rival.result.returncode != 0
    assert "in use by process" in rival.result.stderr
    assert f"step-{STEPS:08d}" in rival.left


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overwrite": True, "resume": True}, "overwrite.*resume"),
        ({"output_dir": None, "overwrite": True}, "overwrite.*output_dir"),
        ({"output_dir": None, "resume": True}, "resume.*output_dir"),
        ({"output_dir": 3}, "output_dir"),
    ],
    ids=str,
)
def test_contradictions(tmp_path, options, match):
    options = {"output_dir": tmp_path, **options}
    with pytest.raises(ConfigError, match=match):
        trainer(options.pop("output_dir"), **options)


def test_the_command_line_respects_a_run_made_in_python(tmp_path):
    trainer(tmp_path).train()
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(tmp_path)
    RunFolder.create(tmp_path, overwrite=True)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_python_respects_a_run_of_the_command_line(tmp_path):
    RunFolder.create(tmp_path).write_config({"training": {}})
    with pytest.raises(RunFolderError, match="already holds a run"):
        trainer(tmp_path).train()


def test_a_folder_object_is_treated_as_its_path(tmp_path):
    trainer(tmp_path).train()
    with pytest.raises(RunFolderError, match="already holds a run"):
        trainer(RunFolder(tmp_path)).train()
    folder = RunFolder(tmp_path)
    with folder.lock():  # whoever holds it has decided
        one = trainer(folder, resume=True)
        one.train(num_epochs=3)
    assert one.state.clock.step == 3 * STEPS


def test_resume_of_damaged_checkpoints_does_not_start_over(tmp_path):
    trainer(tmp_path).train()
    for path in (tmp_path / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="intact"):
        trainer(tmp_path, resume=True)
    trainer(tmp_path, overwrite=True).train()


def test_a_copied_run_can_be_overwritten(tmp_path):
    trainer(tmp_path / "run").train()
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)  # `last` and `best` become folders
    trainer(tmp_path / "copy", lr=0.5, overwrite=True, config={"epochs": 1}).train()
    assert (tmp_path / "copy" / "checkpoints" / "last").resolve().name == f"step-{STEPS:08d}"


@pytest.mark.parametrize("name", ["overwrite", "resume"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(tmp_path, name, value):
    """Text is true: "no" would remove a run."""
    with pytest.raises(ConfigError, match=name):
        Trainer(nn.Linear(2, 2), output_dir=tmp_path / "run", progress=False, **{name: value})
