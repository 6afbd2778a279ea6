"""Trials on a GPU: forks of a process that has torch, but has not touched CUDA."""

from pathlib import Path

import numpy as np
import pytest

from etude.monitor.reading import read_json
from etude.sweep import SweepFolder

pytest.importorskip("optuna")
pytestmark = pytest.mark.gpu


def test_trials_train_on_the_gpu(etude, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    np.savez("points.npz", x=x, y=(x @ rng.normal(size=(8, 3))).argmax(1))
    Path("points.yaml").write_text(
        "model: {name: mlp, in_features: 8, hidden: [16], out_features: 3}\n"
        "data: {name: arrays, path: points.npz, validation: 0.25, test: 0}\n"
        "training: {epochs: 2, batch_size: 32, device: cuda}\n"
    )
    done = etude("sweep", "points.yaml", "optimizer.lr=0.001,0.01,0.02", "--workers", 2, "--dir", "s")
    assert done.code == 0, done.err + done.out
    assert [trial.state.name for trial in SweepFolder("s").study().trials] == ["COMPLETE"] * 3
    for number in range(3):
        assert "cuda" in str(read_json(Path("s", f"trial-{number:04d}", "env.json"))["device"])
