"""The experiment of the fault tests, processes that run it, and a reference that nothing disturbed."""

import time
from pathlib import Path

import pytest
import yaml
from faults_runs import EPOCHS, HERE, SAVE_EVERY, Reference, Server, facts


@pytest.fixture(scope="session")
def etude(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("output"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    """The path of the experiment's config."""
    path = tmp_path_factory.mktemp("experiment") / "toy.yaml"
    config = {
        "imports": [str(HERE / "faults_components.py")],
        "model": "faults_net",
        "data": "faults_points",
        "optimizer": {"name": "adamw", "lr": 0.01},
        "scheduler": {"name": "warmup_cosine", "warmup_steps": 4},
        "training": {
            "epochs": EPOCHS,
            "batch_size": 8,
            "log_interval": 5,
            "save_every_steps": SAVE_EVERY,
            "keep_best": 1,
            "device": "cpu",
            "num_threads": 1,
        },
    }
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@pytest.fixture(scope="session")
def reference(etude, experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    began = time.monotonic()
    code, process = etude.run("train", experiment, "--run-dir", folder)
    assert code == 0, process.err
    return Reference(folder, time.monotonic() - began)


@pytest.fixture(scope="session")
def assert_same_run(reference):
    """Asserts that a finished run left what the reference left."""

    def check(folder: Path) -> None:
        assert facts(folder) == facts(reference.folder)
        assert not [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]

    return check


@pytest.fixture
def resume(etude):
    """Resumes a run until it is finished, and returns what was said on the way."""

    def call(folder: Path) -> str:
        code, process = etude.run("resume", folder)
        assert code == 0, process.err
        return process.err

    return call
