"""A small experiment to sweep: it trains in a moment, and can wait or die in the middle."""

from pathlib import Path

import numpy as np
import pytest

EXPERIMENT = """
imports: [COMPONENTS]
model: {name: mlp, in_features: 8, hidden: [16], out_features: 3, dropout: 0.1}
data: {name: arrays, path: points.npz, validation: 0.25, test: 0}
optimizer: {name: adamw, lr: 0.01}
training: {epochs: 4, batch_size: 32, device: cpu}
callbacks: [hold_or_die]
"""
COMPONENTS = Path(__file__).with_name("sweep_components.py")


@pytest.fixture
def points(tmp_path, monkeypatch) -> Path:
    """The file of the experiment, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    np.savez("points.npz", x=x, y=(x @ rng.normal(size=(8, 3))).argmax(1))
    Path("points.yaml").write_text(EXPERIMENT.replace("COMPONENTS", str(COMPONENTS)))
    return Path("points.yaml")


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "last" / "model.safetensors").read_bytes()


@pytest.fixture
def same_weights(etude):
    """Check that a trial has the bytes of an uninterrupted `etude train` with its settings."""

    def check(trial: Path, *overrides: str) -> None:
        done = etude("train", "points.yaml", *overrides, "--run-dir", "alone", "-q")
        assert done.code == 0, done.err
        assert weights(trial) == weights(Path("alone"))

    return check
