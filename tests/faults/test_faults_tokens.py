"""`kill -9` in the middle of a packed epoch of a language model, then `etude resume`: the same bytes."""

import random

import numpy as np
import pytest
import yaml
from faults_runs import facts, wait_for

from etude.data import TokenWriter

SAVE_EVERY, STEPS = 2, 24


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """The path of a config that trains on packed documents."""
    folder = tmp_path_factory.mktemp("language")
    rng = np.random.default_rng(0)
    for split, documents in (("train", 150), ("validation", 20)):
        with TokenWriter(folder / f"{split}.bin", meta={"vocab_size": 50}) as writer:
            for length in rng.integers(2, 60, documents):
                writer.add(rng.integers(0, 50, length).astype(np.uint16))
    config = {
        "model": {"name": "causal_transformer_lm", "d_model": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.1},
        "data": {"name": "tokens", "root": str(folder), "read": "packed", "length": 32},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "training": {
            "max_steps": STEPS,
            "batch_size": 8,
            "log_interval": 5,
            "save_every_steps": SAVE_EVERY,
            "device": "cpu",
            "num_threads": 1,
        },
    }
    path = folder / "packed.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def test_a_packed_run_killed_twice_ends_as_one_never_killed(etude, language, tmp_path):
    straight, folder = tmp_path / "straight", tmp_path / "killed"
    code, process = etude.run("train", language, "--run-dir", straight)
    assert code == 0, process.err
    rng = random.Random(1)
    process = etude.start("train", language, "--run-dir", folder)
    for _ in range(2):
        wanted = rng.randrange(1, STEPS // SAVE_EVERY) * SAVE_EVERY
        reached = [folder / "checkpoints" / f"step-{step:08d}" for step in range(wanted, STEPS + 1)]
        wait_for(lambda reached=reached: any(path.exists() for path in reached), process)
        process.kill()
        process = etude.start("resume", folder)
    assert process.wait() == 0, process.err
    assert facts(folder) == facts(straight)
