"""A full disk ends a run with one line and loses nothing; with space again it goes on to the same end."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from faults_runs import wait_for

AT = 7  # the next checkpoint is due after step 9


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for a handful of checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Leave not one free block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert os.statvfs(disk).f_bavail == 0
    return filler


def start_gated(etude, experiment, folder, gate):
    gate.mkdir()
    callback = f"callbacks=[{{name: faults_gate, at: {AT}, folder: '{gate}'}}]"
    process = etude.start("train", experiment, "--run-dir", folder, callback)
    wait_for((gate / "reached").exists, process)
    return process


def test_disk_full_while_saving(etude, experiment, small_disk, tmp_path, resume, assert_same_run):
    folder, gate = small_disk / "run", tmp_path / "gate"
    process = start_gated(etude, experiment, folder, gate)
    filler = fill(small_disk)
    (gate / "open").touch()
    assert process.wait() == 2
    (line,) = process.err.splitlines()
    assert line == (
        f"etude: cannot save {folder}/checkpoints/step-00000009: No space left on device; free some space or keep "
        f"fewer checkpoints (earlier checkpoints are unchanged)"
    )
    assert (folder / "checkpoints" / "last").readlink().name == "step-00000006"
    code, process = etude.run("resume", folder)  # still full
    assert code == 2
    assert len(process.err.splitlines()) == 1, process.err
    filler.unlink()
    resume(folder)
    assert_same_run(folder)


def test_disk_full_at_the_start(etude, experiment, small_disk):
    folder = small_disk / "run"
    filler = fill(small_disk)
    code, process = etude.run("train", experiment, "--run-dir", folder)
    assert code == 2
    (line,) = process.err.splitlines()
    assert "No space left on device" in line
    filler.unlink()
    code, process = etude.run("train", experiment, "--run-dir", folder)
    assert code == 0, process.err


def test_a_file_that_may_not_grow(etude, experiment, tmp_path, resume, assert_same_run):
    """The same by a limit on the size of files, which needs no rights: the checkpoint's largest file hits it."""
    folder = tmp_path / "run"
    code, process = etude.run("train", experiment, "--run-dir", folder, max_file_bytes=6000)
    assert code == 2
    (line,) = process.err.splitlines()
    assert line.startswith(f"etude: cannot save {folder}/checkpoints/step-00000003: File too large; ")
    assert line.endswith("(earlier checkpoints are unchanged)")
    resume(folder)
    assert_same_run(folder)


def test_checkpoints_deleted_under_a_running_run(etude, experiment, tmp_path, assert_same_run):
    """Somebody makes space by removing checkpoints: the run goes on and saves again."""
    folder, gate = tmp_path / "run", tmp_path / "gate"
    process = start_gated(etude, experiment, folder, gate)
    shutil.rmtree(folder / "checkpoints")
    (gate / "open").touch()
    assert process.wait() == 0, process.err
    assert_same_run(folder)
