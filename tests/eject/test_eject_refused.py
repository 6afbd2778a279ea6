"""What cannot be written as plain PyTorch is refused with its key and exit code 2; nothing is written then."""

import json
from pathlib import Path

import pytest
import torch

OWN_MODELS = str(Path(__file__).with_name("own_models.py"))
TRAINING = {"epochs": 1, "batch_size": 8, "device": "cpu"}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {**TRAINING, "device": "cuda"}}, "training.device"),
        ({"training": {**TRAINING, "compile": True}}, "training.compile"),
        ({"training": {**TRAINING, "activation_checkpointing": True}}, "training.activation_checkpointing"),
        ({"training": {**TRAINING, "grad_accum_steps": {0: 1, 1: 2}}}, "training.grad_accum_steps"),
        ({"training": {**TRAINING, "precision": "fp16"}}, "training.precision"),
        ({"training": {**TRAINING, "ema": 0.9}}, "training.ema"),
        ({"training": {**TRAINING, "freeze": ["conv1"]}}, "training.freeze"),
        ({"training": {**TRAINING, "batch_transform": "mixup"}}, "training.batch_transform"),
        ({"metrics": ["f1"]}, "metrics"),
        ({"data": {"name": "jsonl", "path": "none.jsonl"}}, "data.name"),
        ({"callbacks": [{"name": "early_stopping"}]}, "callbacks.0"),
        ({"model": {"name": "lenet5", "dtype": "bfloat16"}}, "model"),
        ({"loss": {"name": "cross_entropy", "class_weights": [1.0] * 10}}, "loss.class_weights"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_settings(etude, lenet, tmp_path, sections, key):
    error = etude("eject", lenet(**sections), tmp_path / "plain.py").error
    assert f"{key}: " in error
    assert not (tmp_path / "plain.py").exists()


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"loss": {"name": "language_modeling", "fused_head": True}}, "loss.fused_head"),
        ({"data": {"read": "packed"}}, "data.read"),
        ({"data": {"read": "documents"}}, "data.read"),
        ({"data": {"mask_rate": 0.15, "mask_id": 3}}, "data.mask_rate"),
        ({"loss": {"name": "masked_language_modeling"}}, "loss.name"),
    ],
    ids=str,
)
def test_language(etude, language, tmp_path, sections, key):
    assert f"{key}: " in etude("eject", language(**sections), tmp_path / "plain.py").error


def test_several_tasks(etude, lenet, tmp_path):
    tasks = {"digit": {"data": "default", "head": {"name": "linear", "out_features": 10}, "loss": "cross_entropy"}}
    assert "tasks: " in etude("eject", lenet(tasks=tasks), tmp_path / "plain.py").error


@pytest.mark.parametrize(("name", "words"), [("numpy_net", "head."), ("noisy_net", "evaluation")])
def test_a_model_whose_weights_would_differ(etude, lenet, tmp_path, name, words):
    """The first steps of the file and of the experiment are compared before it is written."""
    error = etude("eject", lenet(imports=[OWN_MODELS], model=name), tmp_path / "plain.py").error
    assert words in error
    assert not (tmp_path / "plain.py").exists()


@pytest.mark.parametrize(
    ("facts", "words"), [({"device": {"type": "cuda"}}, "training.device"), ({"processes": 2}, "2")]
)
def test_runs_whose_weights_have_other_roundings(etude, lenet, tmp_path, facts, words):
    run = tmp_path / "run"
    assert etude("train", lenet(training={**TRAINING, "device": "auto"}), "--run-dir", run, "-q").code == 0
    known = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps({**known, **facts}))
    assert words in etude("eject", run, tmp_path / "plain.py").error


def test_the_threads_of_a_run_are_written(etude, lenet, tmp_path):
    run, out = tmp_path / "run", tmp_path / "plain.py"
    assert etude("train", lenet(training=TRAINING), "--run-dir", run, "-q").code == 0
    assert etude("eject", run, out).code == 0
    assert f"torch.set_num_threads({torch.get_num_threads()})" in out.read_text()


def test_an_existing_file_is_kept(etude, lenet, tmp_path):
    out = tmp_path / "plain.py"
    out.write_text("mine")
    config = lenet()
    assert str(out) in etude("eject", config, out).error
    assert out.read_text() == "mine"
    assert etude("eject", config, out, "training.seed=5", "--overwrite").code == 0
    assert "SEED = 5" in out.read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [("plain", "plain.py"), ("plain.txt", "plain.py"), ("no/such/plain.py", "no/such"), ("folder.py", "folder")],
)
def test_only_files_of_python_code_in_folders_that_exist(etude, lenet, tmp_path, name, words):
    (tmp_path / "folder.py").mkdir()
    config, before = lenet(), sorted(tmp_path.rglob("*"))
    error = etude("eject", config, tmp_path / name, "--overwrite").error
    assert words in error
    assert len(error.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_existing_samples_beside_the_file_are_kept(etude, tmp_path):
    (tmp_path / "table.csv").write_text("a,b,y\n" + "1,2,0.5\n3,4,1.5\n" * 20)
    data = {"name": "csv", "path": str(tmp_path / "table.csv"), "target": "y"}
    config = tmp_path / "table.json"
    config.write_text(json.dumps({"model": {"name": "mlp", "hidden": [4]}, "data": data, "training": TRAINING}))
    (beside := tmp_path / "plain.data.safetensors").write_text("mine")
    assert str(beside) in etude("eject", config, tmp_path / "plain.py").error
    assert beside.read_text() == "mine"
    assert not (tmp_path / "plain.py").exists()
    assert etude("eject", config, tmp_path / "plain.py", "--overwrite").code == 0
