"""Makes small experiments for the command line."""

from pathlib import Path

import pytest
import yaml

COMPONENTS = Path(__file__).with_name("cli_components.py")


@pytest.fixture
def config(tmp_path):
    """Write an experiment that trains in a moment, with sections replaced or added, and return its path."""

    def write(file: str = "toy.yaml", **sections: object) -> Path:
        data = {
            "imports": [str(COMPONENTS)],
            "model": {"name": "cli_net"},
            "data": {"name": "cli_points"},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "training": {"epochs": 2, "batch_size": 8, "device": "cpu"},
            **sections,
        }
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write


@pytest.fixture
def run(etude, config, tmp_path):
    """A finished run of the small experiment."""
    folder = tmp_path / "run"
    outcome = etude("train", config(), "--run-dir", folder, "-q")
    assert outcome.code == 0, outcome.err
    return folder
