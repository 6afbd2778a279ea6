"""Metrics in a config file: results per class have the names that the data has."""

import json

import pytest
import yaml

from etude.experiment import train_experiment
from etude.experiment.run import evaluate_run


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(["lily", "rose", "tulip"], ["lily", "rose", "tulip"]), (["lily", "rose"], ["rose"])],  # binary: the positive
)
def test_classes_have_the_names_of_the_data(kinds, named, tmp_path):
    table = tmp_path / "flowers.csv"
    rows = [f"{place % 3 + place / 100},{place % 7},{kinds[place % len(kinds)]}" for place in range(60)]
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
    assert [name for name in outcome.metrics if name.startswith("val_f1_")] == [f"val_f1_{one}" for one in named]
    _, metrics = evaluate_run(tmp_path / "run", split="validation")
    assert [name for name in metrics if name.startswith("f1_")] == [f"f1_{one}" for one in named]
    matrix = json.loads((tmp_path / "run/metrics/confusion_matrix.json").read_text())
    assert matrix["classes"] == kinds
