"""NaN in the data: an isolated batch is skipped and counted; a run of them stops with one line, weights intact."""

import json
import math

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
