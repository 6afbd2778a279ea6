"""Ctrl-C and SIGTERM: the first finishes the step and saves, the second stops at once; both can be resumed."""

import os
import signal
import subprocess
import sys

import pytest
import yaml
from faults_runs import wait_for

NOTE = "stopping after this step; press Ctrl-C again to stop at once"
AT = 7  # inside the first epoch, one step after a checkpoint


@pytest.fixture
def gated(etude, experiment, tmp_path):
    """A run that waits after step 7, with the functions to wait for it and to let it go on."""
    gate, folder = tmp_path / "gate", tmp_path / "run"
    gate.mkdir()
    callback = f"callbacks=[{{name: faults_gate, at: {AT}, folder: '{gate}'}}]"
    process = etude.start("train", experiment, "--run-dir", folder, callback)
    wait_for((gate / "reached").exists, process)
    return process, folder, (gate / "open").touch


def newest(folder):
    return (folder / "checkpoints" / "last").readlink().name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_finishes_the_step_saves_and_says_how_to_resume(gated, resume, assert_same_run, number):
    process, folder, go_on = gated
    process.send(number)
    wait_for(lambda: NOTE in process.out, process)
    go_on()
    assert process.wait() == 130
    assert process.err == ""
    last = process.out.splitlines()[-1]
    assert last.startswith(f"stopped at step {AT} and saved; ")
    assert last.endswith(f": etude resume {folder}")
    assert newest(folder) == f"step-{AT:08d}"
    assert not (folder / "result.json").exists()
    assert resume(folder) == ""
    assert_same_run(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_while_the_data_is_made(etude, experiment, tmp_path, number):
    """Nothing is lost and nothing waits: one line, exit code 130, and the run can be begun."""
    module, folder = tmp_path / "slow.py", tmp_path / "run"
    module.write_text(
        "import pathlib, time\nfrom etude import register\n"
        "@register('data', 'slow_to_make')\ndef make():\n"
        f"    pathlib.Path({str(tmp_path / 'reached')!r}).touch()\n"
        "    while True:\n        time.sleep(0.01)\n"
    )
    imports = [*yaml.safe_load(experiment.read_text())["imports"], str(module)]
    process = etude.start("train", experiment, "--run-dir", folder, f"imports={imports}", "data=slow_to_make")
    wait_for((tmp_path / "reached").exists, process)
    process.send(number)
    assert process.wait() == 130
    (line,) = process.err.splitlines()
    assert line.startswith("etude: stopped at once; ")
    assert line.endswith(f": etude resume {folder}")


def test_second_signal_stops_at_once(gated, resume, assert_same_run):
    process, folder, go_on = gated
    process.send(signal.SIGINT)
    wait_for(lambda: NOTE in process.out, process)
    process.send(signal.SIGINT)
    assert process.wait() == 130
    (line,) = process.err.splitlines()
    assert line.startswith("etude: stopped at once; ")
    assert line.endswith(f": etude resume {folder}")
    assert newest(folder) == "step-00000006"
    go_on()
    resume(folder)
    assert_same_run(folder)


def test_without_a_display_the_note_goes_to_stderr(etude, experiment, tmp_path):
    folder = tmp_path / "run"
    process = etude.start("train", experiment, "--run-dir", folder, "-q", "training.epochs=1000")
    wait_for((folder / "checkpoints" / "last").exists, process)
    process.send(signal.SIGINT)
    assert process.wait() == 130
    assert process.err == f"etude: {NOTE}\n"
    assert process.out.startswith("stopped at step ")


def test_signal_while_a_checkpoint_is_written(etude, experiment, resume, assert_same_run, tmp_path):
    folder = tmp_path / "run"
    process = etude.start("train", experiment, "--run-dir", folder)
    wait_for(lambda: list((folder / "checkpoints").glob(".tmp-*")), process)
    process.send(signal.SIGINT)
    assert process.wait() == 130
    stopped_at = int(process.out.split("stopped at step ")[1].split()[0])
    assert newest(folder) == f"step-{stopped_at:08d}"
    resume(folder)
    assert_same_run(folder)


def test_stopped_and_resumed_again_and_again(etude, experiment, assert_same_run, tmp_path):
    """Each resume makes at least one step before it obeys, so that even an impatient scheduler gets to the end."""
    folder = tmp_path / "run"
    command, stops = ["train", experiment, "--run-dir", folder], 0
    while not (folder / "result.json").exists():
        process = etude.start(*command)
        lines = 1 if stops < 4 else 3  # the first line of the display says that the run has begun
        wait_for(lambda: process.out.count("\n") >= lines, process)
        process.send(signal.SIGTERM)
        code = process.wait()
        assert code in (0, 130, -signal.SIGTERM), process.err  # the last: it came after the end of the training
        stops += code == 130
        command = ["resume", folder]
    assert stops > 3
    assert_same_run(folder)


def test_ctrl_c_in_a_terminal(experiment, tmp_path):
    """A real process that shares a process group with its shell, as a terminal's Ctrl-C finds it."""
    config = yaml.safe_load(experiment.read_text())
    config["training"]["epochs"] = 100_000
    long = tmp_path / "long.yaml"
    long.write_text(yaml.safe_dump(config))
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "etude", "train", str(long), "--run-dir", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for((folder / "checkpoints" / "step-00000003").exists)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == ""
    assert NOTE in out
    assert out.splitlines()[-1].endswith(f": etude resume {folder}")
