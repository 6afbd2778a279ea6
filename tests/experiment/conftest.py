"""Loads the small experiment with several tasks."""

import copy
from pathlib import Path

import pytest
import yaml

from etude.experiment import load_config
from task_experiment import EXPERIMENT


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load the experiment with sections replaced (None takes one out) and overrides."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides, **sections):
        data = {**copy.deepcopy(EXPERIMENT), **sections}
        path = Path("x.yaml")
        path.write_text(
            yaml.safe_dump({key: value for key, value in data.items() if value is not None}, sort_keys=False)
        )
        return load_config(path, overrides=overrides)

    return call
