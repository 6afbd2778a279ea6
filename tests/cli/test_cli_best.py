"""What the best is, by the keys of a config, on the command line."""

import json
import re

import pytest


def training(**keys):
    return {"epochs": 3, "batch_size": 8, "device": "cpu", **keys}


def test_a_run_is_judged_by_another_metric_and_another_loss(etude, config, tmp_path):
    keys = {"monitor": "val_accuracy", "restore_best": True}
    path = config(training=training(**keys), loss="cross_entropy", validation_loss={"name": "cross_entropy"})
    outcome = etude("train", path, "--run-dir", "run", "-q")
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["monitor"], result["mode"]) == ("val_accuracy", "max")
    assert result["best"]["value"] >= result["last"]["value"]
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("best ")]
    assert f"(step {result['best']['step']})" in line
    best = (tmp_path / "run" / "checkpoints" / "best").resolve().name
    assert best == f"step-{result['best']['step']:08d}"
    assert best in etude("evaluate", "run", "--split", "validation").out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("training.monitor=val_thing", "training.*val_thing.*mode"),
        ("training.mode=least", "training.mode"),
        ("validation_loss=hings", "validation_loss"),
    ],
)
def test_mistakes_are_one_line(etude, config, changes, message):
    outcome = etude("config", "check", config(), changes)
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert re.search(message, outcome.err)


def test_a_metric_that_is_not_reported_stops_the_run_with_the_names_there_are(etude, config):
    outcome = etude("train", config(training=training(monitor="val_f1")), "--run-dir", "run", "-q")
    assert outcome.code == 2
    assert "val_f1" in outcome.err
    assert "val_accuracy, val_loss" in outcome.err


def test_the_models_own_loss_must_be_there(etude, config):
    outcome = etude("train", config(loss="model"), "--run-dir", "run", "-q")
    assert outcome.code == 2
    assert "loss 'model'" in outcome.err
