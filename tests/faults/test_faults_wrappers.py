"""`kill -9` of a run with Lookahead and SAM, then `etude resume`: the bytes of a run that was never killed."""

import time

import pytest
import yaml
from faults_runs import facts, wait_for

WRAPPED = {
    "name": "lookahead",
    "k": 4,
    "optimizer": {"name": "sam", "optimizer": {"name": "adamw", "lr": 0.01}},
}


@pytest.fixture(scope="module")
def wrapped(etude, experiment, tmp_path_factory):
    """The path of the experiment with both wrappers, the folder of a whole run, and how long it took."""
    folder = tmp_path_factory.mktemp("wrapped")
    config = folder / "toy.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(experiment.read_text()) | {"optimizer": WRAPPED}))
    began = time.monotonic()
    code, process = etude.run("train", config, "--run-dir", folder / "whole")
    assert code == 0, process.err
    return config, folder / "whole", time.monotonic() - began


@pytest.mark.parametrize(
    "share", [0.3, 0.6, *(pytest.param(n / 20 + 0.01, marks=pytest.mark.slow) for n in range(20))]
)
def test_killed_and_resumed(etude, wrapped, tmp_path, share):
    config, whole, seconds = wrapped
    folder = tmp_path / "run"
    process = etude.start("train", config, "--run-dir", folder)
    wait_for((folder / "config.yaml").exists, process)
    time.sleep(share * seconds)
    process.kill()
    if not (folder / "result.json").exists():
        code, process = etude.run("resume", folder)
        assert code == 0, process.err
    assert facts(folder) == facts(whole)
