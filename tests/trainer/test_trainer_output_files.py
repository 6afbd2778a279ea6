"""What a run made in Python writes into its folder, and when it has a result."""

import contextlib
import logging
import signal

import pytest
from output_runs import EXPERIMENT, STEPS, Fail, X, Y, files, read, trainer
from torch import nn

from etude import Callback, Trainer, TrainerConfig
from etude.config import read_config
from etude.core import RunFolderError
from etude.distributed import World
from etude.experiment import evaluate_run, load_config, resume_run, train_experiment
from etude.experiment.build import build_trainer
from etude.monitor import FINISHED, RunFolder
from etude.trainer.machine import Machine
from etude.trainer.output import Output


def test_a_run_made_in_python_leaves_the_folder_of_one_from_the_command_line(tmp_path):
    path = tmp_path / "spirals.yaml"
    path.write_text(EXPERIMENT)
    train_experiment(path, run_dir=tmp_path / "cli", progress=False)
    result = trainer(tmp_path / "python", name="mine").train()
    names = [{one.name for one in (tmp_path / kind).iterdir()} for kind in ("cli", "python")]
    names[1].remove("example.safetensors")  # instead of a config that names the data
    assert names[0] == names[1] >= {"config.yaml", "env.json", "metrics.jsonl", "events.jsonl", "result.json"}
    cli, python = (read(tmp_path / kind, "result.json") for kind in ("cli", "python"))
    assert cli.keys() == python.keys()
    assert python["status"] == FINISHED
    assert (python["step"], python["epoch"]) == (2 * STEPS, 2)
    assert python["metrics"] == pytest.approx(result)
    config = read_config(tmp_path / "python" / "config.yaml").data
    assert (config["name"], config["training"]["batch_size"], config["training"]["seed"]) == ("mine", 8, 0)
    assert read(tmp_path / "python", "env.json").keys() == read(tmp_path / "cli", "env.json").keys()


@pytest.mark.parametrize("command", [resume_run, evaluate_run], ids=["resume", "evaluate"])
def test_a_run_made_in_python_is_not_rebuilt_from_its_config_but_by_its_script(tmp_path, command):
    trainer(tmp_path).train()
    before = files(tmp_path)
    with pytest.raises(RunFolderError) as caught:
        command(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "resume=True" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == before


def test_python_going_on_with_a_run_of_the_command_line_keeps_the_config_it_can_be_rebuilt_from(tmp_path):
    path = tmp_path / "spirals.yaml"
    path.write_text(EXPERIMENT)
    run = tmp_path / "run"
    train_experiment(path, ["training.epochs=1"], run_dir=run, progress=False)
    config = (run / "config.yaml").read_bytes()
    built = build_trainer(load_config(path), progress=False)
    data = built.loaders.train, built.loaders.validation
    one = Trainer(built.model, *data, config={"device": "cpu"}, output_dir=run, resume=True, progress=False)
    one.train(num_epochs=2)
    assert (run / "config.yaml").read_bytes() == config
    assert resume_run(run, ["training.epochs=3"], progress=False).epoch == 3


def test_a_result_is_that_of_the_last_training(tmp_path):
    seen = []

    class Look(Callback):
        def on_epoch_begin(self, epoch):
            seen.append((epoch, (tmp_path / "result.json").exists()))

    one = trainer(tmp_path, callbacks=[Look()])
    one.train()
    one.train(num_epochs=3)
    assert seen == [(0, False), (1, False), (2, False)]  # while it trains it is not finished
    assert read(tmp_path, "result.json")["epoch"] == 3
    assert read_config(tmp_path / "config.yaml").data["training"]["epochs"] == 3


@pytest.mark.parametrize("how", ["error", "signal"])
def test_a_run_that_did_not_reach_its_end_has_no_result(tmp_path, how):
    class Interrupt(Callback):
        def on_step_end(self, report):
            signal.raise_signal(signal.SIGINT)

    one = trainer(tmp_path, callbacks=[Fail(2) if how == "error" else Interrupt()])
    with pytest.raises(RuntimeError) if how == "error" else contextlib.nullcontext():
        one.train()
    assert not RunFolder(tmp_path).is_finished
    assert not (tmp_path / "result.json").exists()
    assert (tmp_path / "config.yaml").exists()


def test_early_stopping_is_an_end_with_a_reason(tmp_path):
    class Stop(Callback):
        def on_epoch_end(self, epoch, logs):
            self.control.request_stop("enough")

        def outcome(self):
            return {"looked_at": 3}

    trainer(tmp_path, callbacks=[Stop()]).train()
    result = read(tmp_path, "result.json")
    assert (result["status"], result["reason"], result["epoch"], result["looked_at"]) == (FINISHED, "enough", 1, 3)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer(None).train()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "folder", "warned"),
    [
        ({"save_every_steps": 5}, False, ["save_every_steps", "output_dir"]),
        ({"keep_best": 2}, False, ["keep_best", "output_dir"]),
        ({"checkpoint_interval": 2, "keep_best": 1}, False, ["checkpoint_interval", "keep_best"]),
        ({"save_checkpoints": False, "save_every_steps": 5}, True, ["save_every_steps", "save_checkpoints"]),
        ({"save_checkpoints": False}, False, []),
        ({"save_every_steps": 5}, True, []),
        ({}, False, []),
    ],
    ids=str,
)
def test_settings_of_saving_that_do_nothing_are_warned_of_once(tmp_path, config, folder, warned, caplog):
    where = tmp_path if folder else None
    with caplog.at_level(logging.WARNING, logger="etude"):
        Trainer(nn.Linear(4, 2), (X, Y), (X, Y), config={"device": "cpu", **config}, output_dir=where, progress=False)
    assert len(caplog.records) == bool(warned)
    assert all(word in caplog.text for word in warned)


def test_evaluating_a_run_warns_of_nothing(tmp_path, caplog):
    path = tmp_path / "spirals.yaml"
    path.write_text(EXPERIMENT.replace("training:", "training:\n  keep_best: 1\n  save_every_steps: 3"))
    train_experiment(path, run_dir=tmp_path / "run", progress=False)
    with caplog.at_level(logging.WARNING, logger="etude"):
        evaluate_run(tmp_path / "run", split="train")
    assert not caplog.records


def test_numbers_events_and_what_is_shown_come_from_one_place(tmp_path):
    config, machine = TrainerConfig(device="cpu"), Machine("cpu")
    kinds = lambda output: [type(one).__name__ for one in output.callbacks]
    assert kinds(Output(None, config, machine)) == ["BestMetric"]
    assert kinds(Output(None, config, machine, progress=True)) == ["BestMetric", "ProgressDisplay"]
    shown = ["BestMetric", "RunRecorder", "ProgressDisplay"]
    assert kinds(Output(tmp_path, config, machine, progress=True)) == shown
    other = Machine("cpu", world=World(1, 2))
    assert kinds(Output(tmp_path, config, other, progress=True)) == ["BestMetric"]  # one process writes and prints
