"""Small experiments to eject: digits in idx files, tokens in files, and their config files."""

import struct

import numpy as np
import pytest
import yaml

from etude.data.tokens.writer import TokenWriter

TRAINING = {"epochs": 3, "batch_size": 8, "device": "cpu", "log_interval": 2}


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A folder with idx files of 42 training and 13 test images, whose checksums are not those of MNIST."""
    monkeypatch.setattr("etude.data.catalog.files.mismatch", lambda raw, sha256: "")
    draw, folder = np.random.default_rng(0), tmp_path / "digits"
    folder.mkdir()
    for prefix, count in (("train", 42), ("t10k", 13)):
        images, labels = draw.integers(0, 256, (count, 28, 28), np.uint8), draw.integers(0, 10, count, np.uint8)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / name).write_bytes(head + array.tobytes())
    return folder


@pytest.fixture
def lenet(digits, tmp_path):
    """Write a config of LeNet-5 on the digits; arguments replace its sections."""

    def write(**sections):
        content = {
            "description": "Digits.",
            "model": "lenet5",
            "data": {"name": "mnist", "root": str(digits)},
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.001},
            "training": TRAINING,
        }
        return _write(tmp_path / "digits.yaml", content | sections)

    return write


@pytest.fixture
def language(tmp_path):
    """Write a config of a small transformer on blocks of tokens; arguments replace its sections."""
    draw, folder = np.random.default_rng(1), tmp_path / "tokens"
    folder.mkdir()
    for name, count in (("train", 700), ("validation", 150)):
        with TokenWriter(folder / f"{name}.bin", meta={"vocab_size": 60}) as writer:
            writer.add(draw.integers(0, 60, count))

    def write(data=None, model=None, **sections):
        content = {
            "model": {"name": "causal_transformer_lm", "d_model": 32, "n_layers": 2, "n_heads": 2, "max_len": 16},
            "data": {"name": "tokens", "root": str(folder), "length": 16, **(data or {})},
            "loss": {"name": "language_modeling"},
            "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
            "scheduler": {"name": "warmup_cosine", "warmup_steps": 3},
            "training": {**TRAINING, "epochs": None, "max_steps": 9},
        }
        content["model"] |= model or {}
        return _write(tmp_path / "language.yaml", content | sections)

    return write


def _write(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path
