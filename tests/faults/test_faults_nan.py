"""NaN in the data: an isolated batch is skipped and counted; a run of them stops with one line, weights intact."""

import json
import math

import pytest
from safetensors.torch import load_file


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_finite(folder):
    weights = load_file(folder / "checkpoints" / "last" / "model.safetensors")
    assert [name for name, value in weights.items() if not value.isfinite().all()] == []


def test_one_bad_batch_is_skipped_and_counted(etude, experiment, tmp_path):
    folder = tmp_path / "run"
    code, process = etude.run("train", experiment, "--run-dir", folder, "data.nan_from=16", "data.nan_batches=1")
    assert code == 0, process.err
    assert process.err == ""
    skipped = {record["step"]: record["skipped"] for record in records(folder) if record["split"] == "train"}
    assert skipped == {5: 0, 10: 0, 15: 0, 20: 1, 25: 0, 30: 0, 35: 0}
    assert [r["skipped"] for r in records(folder) if r["split"] == "epoch"] == [0, 1, 0]
    assert_finite(folder)
    result = json.loads((folder / "result.json").read_text())
    assert math.isfinite(result["metrics"]["val_loss"])


@pytest.mark.parametrize("length", [["training.epochs=1"], ["training.max_steps=7"]])
def test_a_run_that_learned_nothing_does_not_say_finished(etude, experiment, tmp_path, length):
    folder = tmp_path / "run"
    code, process = etude.run("train", experiment, "--run-dir", folder, "data.nan_from=0", *length)
    assert code == 2
    (line,) = process.err.splitlines()
    assert "so nothing was learned" in line
    assert "finished" not in process.out
    assert not (folder / "result.json").exists()


def test_numbers_that_are_not_finite_are_in_the_summary(etude, experiment, tmp_path):
    folder = tmp_path / "run"
    spoiled = ["data.nan_from=0", "data.nan_batches=11", "data.nan_validation=true", "training.epochs=1"]
    code, process = etude.run("train", experiment, "--run-dir", folder, *spoiled)
    assert code == 0, process.err
    (summary,) = [line.split() for line in process.out.splitlines() if line.split()[:1] == ["val_loss"]]
    assert summary == ["val_loss", "nan"]
    assert "11 of 12 (92%)" in process.out
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"]["val_loss"] is None
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum("11 of 12" in event.get("message", "") for event in events) == 1


def test_bad_batches_without_end_stop_the_run(etude, experiment, tmp_path):
    folder = tmp_path / "run"
    arguments = ["data.nan_from=16", "training.max_skipped_steps=5"]
    code, process = etude.run("train", experiment, "--run-dir", folder, *arguments)
    assert code == 2
    (line,) = process.err.splitlines()
    assert line.startswith("etude: the loss or its gradients were not finite in the last 8 steps, up to step 24; ")
    assert "training.max_skipped_steps" in line
    assert not (folder / "result.json").exists()
    assert_finite(folder)
    code, process = etude.run("evaluate", folder, "--split", "validation")
    assert code == 0, process.err
    assert "nan" not in process.out
