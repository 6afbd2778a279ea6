"""Two processes that want one run folder: the second says so in one line, the first does not notice."""

import pytest
from faults_runs import wait_for


@pytest.mark.parametrize("command", ["train", "train --overwrite", "resume"])
def test_second_process_is_refused(etude, experiment, assert_same_run, tmp_path, command):
    folder, gate = tmp_path / "run", tmp_path / "gate"
    gate.mkdir()
    callback = f"callbacks=[{{name: faults_gate, at: 7, folder: '{gate}'}}]"
    first = etude.start("train", experiment, "--run-dir", folder, callback)
    wait_for((gate / "reached").exists, first)
    name, *options = command.split()
    second = [name, folder] if name == "resume" else [name, experiment, "--run-dir", folder, *options]
    code, process = etude.run(*second)
    assert code == 2
    assert process.err == (
        f"etude: run folder {folder} is in use by process {first.pid}; wait until it ends, stop it, or choose another "
        f"--run-dir\n"
    )
    (gate / "open").touch()
    assert first.wait() == 0, first.err
    assert first.err == ""
    assert_same_run(folder)


def test_evaluating_a_run_that_trains_is_allowed(etude, experiment, assert_same_run, tmp_path):
    folder, gate = tmp_path / "run", tmp_path / "gate"
    gate.mkdir()
    callback = f"callbacks=[{{name: faults_gate, at: 14, folder: '{gate}'}}]"
    first = etude.start("train", experiment, "--run-dir", folder, callback)
    wait_for((gate / "reached").exists, first)
    code, process = etude.run("evaluate", folder, "--split", "validation")
    assert code == 0, process.err
    assert "step-00000012 on the validation split" in process.out
    (gate / "open").touch()
    assert first.wait() == 0, first.err
    assert_same_run(folder)
