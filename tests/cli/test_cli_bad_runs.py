"""Whatever is wrong with a run folder or a checkpoint: exit code 2 and one line, no traceback."""

import json
import re
import shlex
import shutil

import pytest
import yaml

TRAINING = {"epochs": 2, "batch_size": 8, "device": "cpu"}


# ------------------------------------------------------------------------------------------------ run folders


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_unwritable_run_folder(etude, config, tmp_path, below):
    (tmp_path / "file").write_text("mine")
    line = etude("train", config(), "--run-dir", tmp_path / below).error
    assert f"cannot write run folder {tmp_path / below}: " in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 300])
def test_run_folder_that_no_system_has(etude, config, tmp_path, name):
    for arguments in (["train", config(), "--run-dir", tmp_path / name], ["resume", tmp_path / name]):
        outcome = etude(*arguments)
        assert outcome.code == 2
        assert len(outcome.errors) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.yaml"]


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".yaml", "\udcff", "\udcff.yaml", "a\0b.yaml"])
def test_experiment_that_no_system_has(etude, name):
    assert etude("train", name).code == 2


def test_train_in_a_folder_that_holds_a_run(etude, config, run):
    before = (run / "checkpoints" / "last" / "model.safetensors").read_bytes()
    line = etude("train", config(), "--run-dir", run, "training.seed=1").error
    assert f"{run} already holds a run; use `etude resume {run}` or another --run-dir" in line
    assert (run / "checkpoints" / "last" / "model.safetensors").read_bytes() == before


def test_resume_of_a_finished_run(etude, run):
    line = etude("resume", run).error
    assert f"run {run} is finished (2 epochs, 10 steps)" in line
    command = line.split("`")[1].split()
    assert command[:3] == ["etude", "resume", str(run)]
    assert etude(*command[1:], "-q").code == 0  # the remedy works
    assert json.loads((run / "result.json").read_text())["epoch"] == 7


def test_commands_are_quoted(etude, config, tmp_path):
    path = config()
    folder = tmp_path / "a b; 'c'"
    assert etude("train", path, "--run-dir", folder, "-q").code == 0
    for line in (etude("train", path, "--run-dir", folder).error, etude("resume", folder).error):
        command = re.search(r"`(etude resume .*?)( training\S+)?`", line)
        assert command is not None
        assert shlex.split(command[1]) == ["etude", "resume", str(folder)]


def test_resume_of_a_finished_run_with_more_epochs_and_a_larger_batch(etude, run):
    """All epochs with the new batch size have fewer steps than the run has made."""
    assert etude("resume", run, "training.epochs=3", "training.batch_size=1000", "-q").code == 0
    result = json.loads((run / "result.json").read_text())
    assert (result["epoch"], result["step"]) == (3, 11)


def test_a_mistaken_override_of_a_resume_is_not_kept(etude, run):
    before = (run / "config.yaml").read_bytes()
    refused = etude("resume", run, "training.epochs=3", "training.batch_transform=cutmix", "-q")
    assert refused.code == 2
    assert "CutMix" in refused.err
    assert "config.yaml" in refused.err
    assert (run / "config.yaml").read_bytes() == before
    assert etude("resume", run, "training.epochs=3", "-q").code == 0
    assert (run / "config.yaml").read_bytes() != before


def test_resume_of_a_finished_run_with_a_nearer_end(etude, run):
    assert "is finished" in etude("resume", run, "training.epochs=1").error
    assert "is finished" in etude("resume", run, "training.log_interval=3").error


@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_what_is_no_run_folder(etude, run, tmp_path, command):
    assert f"there is no run folder {tmp_path}/nothing; choose a folder made by" in etude(
        command, "nothing"
    ).error.replace("folder nothing", f"folder {tmp_path}/nothing")
    assert f"is not a run folder: it has no config.yaml; did you mean {run}?" in etude(command, tmp_path).error
    (tmp_path / "empty").mkdir()
    assert "is not a run folder: it has no config.yaml; choose a folder" in etude(command, tmp_path / "empty").error


def test_evaluate_without_a_checkpoint(etude, run):
    shutil.rmtree(run / "checkpoints")
    assert f"there is no checkpoint in {run}/checkpoints; train first" in etude("evaluate", run).error


def test_evaluate_on_an_unknown_split(etude, run):
    line = etude("evaluate", run, "--split", "tst").error
    assert (
        "the data of this run has no split 'tst'; did you mean 'test'? (there are: train, validation, test)" in line
    )
    assert "has no split 'num_classes'" in etude("evaluate", run, "--split", "num_classes").error


@pytest.mark.parametrize("which", ["7", "bset", "-1", "²", "", "5\n"])
def test_evaluate_an_unknown_checkpoint(etude, run, which):
    line = etude("evaluate", run, "--checkpoint", which).error
    assert f"has no checkpoint {which!r} (available: 5, 10, best, last)" in line


def test_evaluate_a_checkpoint_of_a_huge_step(etude, run):
    assert "has no checkpoint '999" in etude("evaluate", run, "--checkpoint", "9" * 5000).error


# ------------------------------------------------------------------------------------------------ checkpoints


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-3])


FILES = ["model.safetensors", "state.safetensors", "state.json", "meta.json", "manifest.json"]


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
@pytest.mark.parametrize("file", FILES)
def test_damaged_checkpoint_is_passed_over(etude, run, damage, file):
    """The older one is used, with a warning; the work after it is done again, to the same end."""
    weights = (run / "checkpoints" / "last" / "model.safetensors").read_bytes()
    (run / "result.json").unlink()
    damage(run / "checkpoints" / "step-00000010" / file)
    outcome = etude("resume", run, "-q")
    assert outcome.code == 0
    (line,) = outcome.errors
    assert line.startswith("etude: passed over: ")
    assert "step-00000010" in line
    assert file in line
    assert line.endswith("; continuing from step-00000005")
    assert (run / "checkpoints" / "last" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("which", ["best", "last"])
def test_damaged_checkpoint_is_not_evaluated(etude, run, which):
    flip_a_bit(run / "checkpoints" / "step-00000010" / "model.safetensors")
    outcome = etude("evaluate", run, "--checkpoint", which)
    assert outcome.code == 0
    assert "step-00000010 is damaged" in outcome.errors[0]
    assert "step-00000005 on the test split" in outcome.out


def test_no_checkpoint_is_intact(etude, run):
    (run / "result.json").unlink()
    for step in (5, 10):
        flip_a_bit(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    for command in ("resume", "evaluate"):
        outcome = etude(command, run)
        assert outcome.code == 2
        assert len(outcome.errors) == 1
        assert (
            f"no checkpoint in {run}/checkpoints is intact: step-00000010 is damaged: model.safetensors"
            in outcome.err
        )
        assert "; step-00000005 is damaged: model.safetensors" in outcome.err
        assert outcome.err.endswith("; restore a copy, or train again\n")


@pytest.mark.parametrize("command", [["resume"], ["evaluate"], ["resume", "training.epochs=9", "model.width=9"]])
def test_checkpoint_of_another_architecture(etude, run, command):
    if len(command) == 1:
        (run / "result.json").unlink()
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["model"]["width"] = 9
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    before = sorted((run / "checkpoints").glob("*/*"))
    line = etude(command[0], run, *command[1:]).error
    assert "belongs to another architecture: 0.weight: checkpoint (8, 6), model (9, 6)" in line
    assert sorted((run / "checkpoints").glob("*/*")) == before
