"""Metrics in a config file: results per class have the names that the data has."""

import json

import pytest
import yaml

from etude.experiment import train_experiment
from etude.experiment.opened import evaluate_run
from etude.optim.schedules import _fit_warmup_once


def flowers(folder, kinds, test=0.0, **training):
    """Write a table of flowers, and a config that learns their kinds."""
    table = folder / "flowers.csv"
    rows = [f"{place % 3 + place / 100},{place % 7},{kinds[place % len(kinds)]}" for place in range(60)]
    table.write_text("\n".join(["length,width,kind", *rows]) + "\n")
    config = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "csv", "path": str(table), "target": "kind", "validation": 0.3, "test": test},
        "metrics": [{"name": "f1", "average": "none"}, "confusion_matrix"],
        "training": {"epochs": 1, "device": "cpu", **training},
    }
    path = folder / "flowers.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(["lily", "rose", "tulip"], ["lily", "rose", "tulip"]), (["lily", "rose"], ["rose"])],  # binary: the positive
)
def test_classes_have_the_names_of_the_data(kinds, named, tmp_path):
    outcome = train_experiment(flowers(tmp_path, kinds), run_dir=tmp_path / "run", progress=False)
    assert [name for name in outcome.metrics if name.startswith("val_f1_")] == [f"val_f1_{one}" for one in named]
    metrics = evaluate_run(tmp_path / "run", split="validation").metrics
    assert [name for name in metrics if name.startswith("f1_")] == [f"f1_{one}" for one in named]
    matrix = json.loads((tmp_path / "run/metrics/confusion_matrix.json").read_text())
    assert matrix["classes"] == kinds


@pytest.mark.parametrize(
    ("of", "folder", "samples"), [({}, "test", 12), ({"data": "flowers.csv"}, "data-flowers", 60)]
)
def test_an_evaluation_writes_the_files_of_its_metrics(of, folder, samples, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_experiment(flowers(tmp_path, ["lily", "rose", "tulip"], test=0.2), run_dir="run", progress=False)
    before = (tmp_path / "run/metrics/confusion_matrix.json").read_bytes()
    files = evaluate_run("run", **of).files
    assert [str(file) for file in files] == [
        f"run/metrics/{folder}/confusion_matrix.{end}" for end in ("json", "svg")
    ]
    assert sum(map(sum, json.loads(files[0].read_text())["matrix"])) == samples
    assert files[1].read_text().startswith("<svg")
    assert (tmp_path / "run/metrics/confusion_matrix.json").read_bytes() == before


def test_one_process_evaluates_what_several_have_divided(tmp_path):
    train_experiment(flowers(tmp_path, ["lily", "rose", "tulip"]), run_dir=tmp_path / "run", progress=False)
    expected = evaluate_run(tmp_path / "run", split="validation").metrics
    divided = ["parallel.shard=2", "parallel.tensor=2", "parallel.meta_device=true"]
    assert evaluate_run(tmp_path / "run", split="validation", overrides=divided).metrics == expected


def test_a_folder_that_cannot_be_written_does_not_stop_an_evaluation(tmp_path, caplog):
    train_experiment(flowers(tmp_path, ["lily", "rose", "tulip"]), run_dir=tmp_path / "run", progress=False)
    (tmp_path / "run/metrics/validation").write_text("a file")
    found = evaluate_run(tmp_path / "run", split="validation")
    assert found.metrics
    assert not found.files
    assert [record.message.startswith(str(tmp_path / "run/metrics/validation")) for record in caplog.records] == [
        True
    ]


def test_an_evaluation_says_nothing_about_training(tmp_path, caplog):
    settings = {"warmup_steps": 500, "keep_best": 1, "monitor": "val_loss", "mode": "max"}
    train_experiment(
        flowers(tmp_path, ["lily", "rose", "tulip"], **settings), run_dir=tmp_path / "run", progress=False
    )
    assert "warmup_steps" in caplog.text
    caplog.clear()
    _fit_warmup_once.cache_clear()  # it warns once
    evaluate_run(tmp_path / "run", split="validation")
    assert not caplog.records
