"""WandbLogger, TrackioLogger and MLflowLogger: the calls they make, and the real packages where they are installed."""

import json
import logging
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import etude
from etude.callbacks import Callback, MLflowLogger, TrackioLogger, WandbLogger
from etude.core import ConfigError
from etude.monitor import RunFolder
from sink_stand_ins import install

DATA = (torch.randn(64, 4), torch.randint(0, 3, (64,)))
ALL = {"wandb": WandbLogger, "trackio": TrackioLogger, "mlflow": MLflowLogger}
every_tool = pytest.mark.parametrize("tool", ALL)
EVERY_STEP = {"points_per_s": None}


def make(*callbacks, output_dir=None, **kwargs):
    config = {"epochs": 2, "batch_size": 8, "log_interval": 2, "device": "cpu", **kwargs.pop("config", {})}
    torch.manual_seed(0)
    return etude.Trainer(
        nn.Linear(4, 3),
        DATA,
        DATA,
        config=config,
        callbacks=list(callbacks),
        progress=False,
        output_dir=output_dir,
        **kwargs,
    )


class Dies(Callback):
    """Ends the run after some steps, as a crash would."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_step_end(self, report):
        self.left -= 1
        if self.left == 0:
            raise LookupError


def expected(run, split, name):
    found = [one for one in RunFolder(run).read_metrics() if one["split"] == split]
    return [(one["step"], one[name]) for one in found]


# --- stand-ins


@every_tool
def test_metrics_config_and_media_by_step(tool, monkeypatch, tmp_path):
    runs = install(monkeypatch)[tool]
    logs = make(ALL[tool](**EVERY_STEP), output_dir=tmp_path / "run", metrics=["confusion_matrix"]).train()
    (run,) = runs
    assert run.curve("train/loss") == expected(tmp_path / "run", "train", "loss")
    assert run.curve("val/loss") == expected(tmp_path / "run", "val", "val_loss")
    assert run.curve("epoch/loss")[-1] == (16, logs["loss"])
    if tool == "mlflow":
        assert run.params["training.batch_size"] == "8"
        assert run.artifacts[0] == str(tmp_path / "run" / "config.yaml")
        assert run.artifacts[1:] == [f"confusion_matrix/step-{step:08d}.json" for step in (8, 16)]
        assert run.ended == "FINISHED"
    else:
        assert run.arguments["config"]["training"]["batch_size"] == 8
        assert [step for step, _ in run.curve("confusion_matrix")] == [8, 16]
        assert run.ended == 0
    if tool == "wandb":
        assert run.summary["val_loss"] == logs["val_loss"]
        assert run.summary["status"] == "finished"


@every_tool
def test_a_resumed_run_continues_the_same_run_without_repeated_points(tool, monkeypatch, tmp_path):
    runs = install(monkeypatch)[tool]
    make(ALL[tool](**EVERY_STEP), output_dir=tmp_path / "straight").train()
    straight = runs.pop()
    with pytest.raises(LookupError):
        make(ALL[tool](**EVERY_STEP), Dies(after=13), output_dir=tmp_path / "run").train()
    assert runs[0].curve("train/loss")[-1][0] == 12  # the checkpoint is that of step 8
    make(ALL[tool](**EVERY_STEP), output_dir=tmp_path / "run", resume=True).train()
    points = [point for run in runs for point in run.points]
    for name in ("train/loss", "val/loss", "epoch/loss"):
        found = [(step, value) for step, one, value in points if one == name]
        assert found == straight.curve(name)
    if tool == "mlflow":
        assert len(runs) == 1
    else:
        key = {"wandb": "id", "trackio": "name"}[tool]
        assert runs[0].arguments[key] == runs[1].arguments[key] != ""
        assert runs[1].arguments["resume"] == "allow"


@every_tool
def test_a_run_that_died_before_its_first_checkpoint_keeps_its_id(tool, monkeypatch, tmp_path):
    install(monkeypatch)
    path = tmp_path / "run" / "sinks" / f"{tool}.json"
    with pytest.raises(LookupError):
        make(ALL[tool](**EVERY_STEP), Dies(after=5), output_dir=tmp_path / "run").train()
    first = json.loads(path.read_text())
    assert first["written"] == {"train": 4}
    make(ALL[tool](**EVERY_STEP), output_dir=tmp_path / "run", resume=True).train()
    again = json.loads(path.read_text())
    assert again["id"] == first["id"] != ""
    make(ALL[tool](**EVERY_STEP), output_dir=tmp_path / "run", overwrite=True).train()
    assert json.loads(path.read_text())["id"] != first["id"] or tool == "mlflow"  # the stand-in counts from zero


@every_tool
def test_the_status_of_a_run_that_failed(tool, monkeypatch, tmp_path):
    runs = install(monkeypatch)[tool]
    with pytest.raises(LookupError):
        make(ALL[tool](), Dies(after=3)).train()
    assert runs[0].ended == {"wandb": 1, "trackio": 0, "mlflow": "FAILED"}[tool]


def test_a_parameter_that_changed_does_not_stop_a_resumed_run(monkeypatch, tmp_path, caplog):
    """MLflow refuses other values of parameters that it knows."""
    runs = install(monkeypatch)["mlflow"]
    make(MLflowLogger(), output_dir=tmp_path / "run").train()
    trainer = make(MLflowLogger(), output_dir=tmp_path / "run", resume=True, config={"epochs": 3})
    trainer.train()
    assert runs[0].params["training.epochs"] == "2"
    assert "mlflow" not in caplog.text


def test_wandb_without_credentials_is_refused_before_training(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr("wandb.login", lambda verify, prompt: False)
    with pytest.raises(ConfigError, match="wandb login"):
        make(WandbLogger()).train()
    make(WandbLogger(mode="offline")).train()


@every_tool
def test_two_in_one_run_are_refused(tool, monkeypatch, tmp_path):
    install(monkeypatch)
    with pytest.raises(ConfigError, match=ALL[tool].__name__):
        make(ALL[tool](), ALL[tool](), output_dir=tmp_path / "run").train()


def test_what_trackio_had_not_written_is_logged_again(monkeypatch, tmp_path):
    """It keeps points in memory for half a second; a process that is killed loses them."""
    runs, folder = install(monkeypatch)["trackio"], tmp_path / "run"
    config = {"save_every_steps": 4}
    with pytest.raises(LookupError):
        make(TrackioLogger(**EVERY_STEP), Dies(7), output_dir=folder, config=config).train()
    runs[0].points = [one for one in runs[0].points if one[0] <= 4]
    make(TrackioLogger(**EVERY_STEP), output_dir=folder, config=config, resume=True).train()
    assert [step for run in runs for step, _ in run.curve("train/loss")] == [*range(2, 17, 2)]


def test_the_step_that_wandb_holds_is_logged_again_if_the_process_is_killed(monkeypatch, tmp_path):
    runs, folder = install(monkeypatch)["wandb"], tmp_path / "run"
    file = folder / "sinks" / "wandb.json"
    kept: list[dict[str, int]] = []

    class Looks(WandbLogger):
        def write(self, events):
            super().write(events)
            kept.append(json.loads(file.read_text())["written"] | {"newest": max(self._written.values(), default=-1)})

    make(Looks(**EVERY_STEP), output_dir=folder).train()
    logged = [one for one in kept if one["newest"] > 0]
    assert logged
    assert all(one.get("train", -1) < one["newest"] for one in logged)  # a killed process had not written that one
    assert json.loads(file.read_text())["written"]["train"] == 16  # finish() writes it
    make(Looks(**EVERY_STEP), output_dir=folder, resume=True, config={"epochs": 3}).train()
    assert [step for run in runs for step, _ in run.curve("train/loss")] == [*range(2, 25, 2)]


def test_a_database_that_fails_is_reported_once(monkeypatch, tmp_path, caplog):
    install(monkeypatch)
    import mlflow

    def fail(*_, **__):
        logging.getLogger("mlflow.store.db.utils").error("attempt to write a readonly database")  # as MLflow does
        raise OSError("attempt to write a readonly database")

    made = mlflow.MlflowClient(None)
    made.log_batch = lambda run_id, metrics=(), params=(): fail() if metrics else None
    monkeypatch.setattr(mlflow, "MlflowClient", lambda _uri: made)
    monkeypatch.setattr(MLflowLogger, "pause_s", 0.0)
    make(MLflowLogger(**EVERY_STEP), output_dir=tmp_path / "run").train()
    assert sum("readonly" in record.getMessage() for record in caplog.records) == 1


def test_two_runs_may_make_an_experiment_of_mlflow_at_once(monkeypatch, tmp_path):
    runs = install(monkeypatch)["mlflow"]
    import mlflow
    from mlflow.exceptions import MlflowException

    made = mlflow.MlflowClient(None)
    asked = iter([None, SimpleNamespace(experiment_id="7")])

    def refuse(_name):
        raise MlflowException("experiment already exists")

    made.get_experiment_by_name, made.create_experiment = lambda _name: next(asked), refuse
    monkeypatch.setattr(mlflow, "MlflowClient", lambda _uri: made)
    make(MLflowLogger(**EVERY_STEP), output_dir=tmp_path / "run").train()
    assert runs[0].arguments["experiment"] == "7"
    assert runs[0].curve("train/loss") == expected(tmp_path / "run", "train", "loss")


# --- the real packages


def wandb_records(run):
    """Yield the records of all files of a run, in the format of LevelDB's log that wandb writes."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run.rglob("*.wandb"), key=os.path.getmtime):
        data, place, parts = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            _, size, kind = struct.unpack_from("<IHB", data, place)
            parts, place = parts + data[place + 7 : place + 7 + size], place + 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(parts)
                parts = b""


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LookupError):
        make(WandbLogger("mine", mode="offline", **EVERY_STEP), Dies(after=13), output_dir=tmp_path / "run").train()
    make(WandbLogger("mine", mode="offline", **EVERY_STEP), output_dir=tmp_path / "run", resume=True).train()
    records = list(wandb_records(tmp_path / "run"))
    assert not (tmp_path / "wandb").exists()
    history = [
        {(one.key or one.nested_key[0]): json.loads(one.value_json) for one in record.history.item}
        for record in records
    ]
    points = [(one["_step"], one["train/loss"]) for one in history if "train/loss" in one]
    assert points == expected(tmp_path / "run", "train", "loss")
    assert [one["_step"] for one in history if "val/loss" in one] == [8, 16]
    runs = [record.run for record in records if record.HasField("run")]
    assert {run.run_id for run in runs} == {json.loads((tmp_path / "run/sinks/wandb.json").read_text())["id"]}
    assert {run.project for run in runs} == {"mine"}
    config = {one.key: json.loads(one.value_json) for run in runs for one in run.config.update}
    assert config["training"]["batch_size"] == 8
    summary = {one.key: one.value_json for record in records for one in record.summary.update}
    assert json.loads(summary["status"]) == "finished"


@pytest.mark.filterwarnings("ignore")  # of its own parts about each other
def test_mlflow_sqlite(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sink = {"tracking_uri": uri, "experiment": "mine", **EVERY_STEP}
    with pytest.raises(LookupError):
        make(MLflowLogger(**sink), Dies(after=13), output_dir=tmp_path / "run", metrics=["confusion_matrix"]).train()
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FAILED"
    make(MLflowLogger(**sink), output_dir=tmp_path / "run", resume=True, metrics=["confusion_matrix"]).train()
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.batch_size"] == "8"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == expected(tmp_path / "run", "train", "loss")
    names = {one.path for one in client.list_artifacts(run.info.run_id)}
    assert names == {"config.yaml", "confusion_matrix"}
    assert [one.path for one in client.list_artifacts(run.info.run_id, "confusion_matrix")] == [
        f"confusion_matrix/step-{step:08d}.json" for step in (8, 16)
    ]


def test_trackio_database(tmp_path):
    """In a process of its own: Trackio reads its folder from the environment when it is imported."""
    pytest.importorskip("trackio")
    code = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import pytest
        from test_sink_services import EVERY_STEP, Dies, TrackioLogger, make
        with pytest.raises(LookupError):
            make(TrackioLogger("mine", **EVERY_STEP), Dies(after=13), output_dir="run").train()
        make(TrackioLogger("mine", **EVERY_STEP), output_dir="run", resume=True, metrics=["confusion_matrix"]).train()
        """
    )
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    tests = Path(__file__).parent
    env["PYTHONPATH"] = os.pathsep.join([*sys.path, str(tests.parent)])
    done = subprocess.run([sys.executable, "-c", code, tests], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    logged = [(step, json.loads(text)) for _, step, text in rows]
    points = [(step, values["train/loss"]) for step, values in logged if "train/loss" in values]
    assert points == expected(tmp_path / "run", "train", "loss")


def test_wandb_after_a_kill(tmp_path):
    """kill -9: all points but the last are in wandb's file, long before it would write them by default."""
    pytest.importorskip("wandb")
    code = textwrap.dedent(
        """
        import os, pathlib, signal, sys, time, torch
        import etude
        from etude.callbacks import Callback, WandbLogger

        class Dies(Callback):
            def on_log(self, record):
                time.sleep(0.11)
                if record["step"] == 20:
                    deadline = time.time() + 120  # its process may need a while to start
                    while time.time() < deadline and b"".join(
                        path.read_bytes() for path in pathlib.Path("run").rglob("*.wandb")
                    ).count(b"_step") < 9:
                        time.sleep(0.05)
                    os.kill(os.getpid(), signal.SIGKILL)

        data = (torch.randn(256, 4), torch.randint(0, 3, (256,)))
        config = {"epochs": 1, "batch_size": 8, "log_interval": 2, "device": "cpu"}
        callbacks = [WandbLogger(mode="offline", points_per_s=None), Dies()]
        etude.Trainer(torch.nn.Linear(4, 3), data, config=config, callbacks=callbacks, output_dir="run").train()
        """
    )
    env = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}  # that of an earlier test
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    steps = {
        json.loads(item.value_json)
        for record in wandb_records(tmp_path / "run")
        for item in record.history.item
        if "_step" in (item.key, *item.nested_key)
    }
    assert set(range(2, 19, 2)) <= steps
