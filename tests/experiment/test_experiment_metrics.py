"""Metrics in a config file: results per class have the names that the data has."""

import json

import yaml

from etude.experiment import train_experiment


def test_classes_have_the_names_of_the_data(tmp_path):
    table = tmp_path / "flowers.csv"
    rows = [f"{place % 3 + place / 100},{place % 7},{['lily', 'rose', 'tulip'][place % 3]}" for place in range(60)]
    table.write_text("\n".join(["length,width,kind", *rows]) + "\n")
    config = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "csv", "path": str(table), "target": "kind", "validation": 0.3, "test": 0.0},
        "metrics": [{"name": "f1", "average": "none"}, "confusion_matrix"],
        "training": {"epochs": 1, "device": "cpu"},
    }
    path = tmp_path / "flowers.yaml"
    path.write_text(yaml.safe_dump(config))
    outcome = train_experiment(path, run_dir=tmp_path / "run", progress=False)
    assert {"val_f1_lily", "val_f1_rose", "val_f1_tulip"} <= outcome.metrics.keys()
    matrix = json.loads((tmp_path / "run/metrics/confusion_matrix.json").read_text())
    assert matrix["classes"] == ["lily", "rose", "tulip"]
