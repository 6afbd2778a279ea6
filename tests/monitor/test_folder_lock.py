"""The lock of a run folder: one process at a time, freed when that process dies in any way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.core import RunFolderError
from etude.monitor import RunFolder

HOLD = """
import os, sys
from etude.monitor import RunFolder
with RunFolder(sys.argv[1]).lock():
    child = -1 if sys.argv[2] == "alone" else os.fork()
    if child == 0 and sys.argv[2] == "child ends":
        sys.exit()  # leaves the block, as a worker that ends in an orderly way does
    if child > 0 and sys.argv[2] == "child ends":
        assert os.waitpid(child, 0)[1] == 0
    if child != 0 and sys.argv[2] != "child stays":
        print(child, flush=True)
    if child == 0:  # it runs, so that it has given up what is the parent's
        print(os.getpid(), flush=True)
    os.read(0, 1)  # until stdin is closed
"""


def holder(folder: Path, how: str = "alone") -> tuple[subprocess.Popen, int]:
    """Start a process that holds the lock, and return it with the child it may have forked."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_second_process_is_refused_until_the_first_is_killed(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({})
    process, _ = holder(folder.path)
    try:
        message = rf"run folder .*run is in use by process {process.pid}; .* --run-dir"
        with pytest.raises(RunFolderError, match=message), folder.lock():
            pytest.fail("entered a folder that is in use")
        with pytest.raises(RunFolderError, match=message):
            RunFolder.create(folder.path, overwrite=True)
        assert folder.holds_run
        process.send_signal(signal.SIGKILL)
        process.wait()
        with folder.lock():
            assert folder.lock_path.read_text() == f"{os.getpid()}\n"
    finally:
        end(process)


def test_a_forked_worker_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    process, child = holder(folder.path, "child stays")
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # it lives
        with folder.lock():
            pass
    finally:
        end(process)


def test_the_lock_survives_a_forked_child_that_ends(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    process, _ = holder(folder.path, "child ends")
    try:
        with pytest.raises(RunFolderError, match=f"process {process.pid}"), folder.lock():
            pytest.fail("entered a folder that is in use")
    finally:
        end(process)


def test_lock_is_free_after_the_block_and_after_an_error(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(KeyError), folder.lock():
        raise KeyError
    with folder.lock(), pytest.raises(RunFolderError, match=f"process {os.getpid()}"), folder.lock():
        pytest.fail("entered twice")
    with folder.lock():
        pass


def test_a_folder_that_cannot_be_written_is_one_line_with_a_remedy(tmp_path):
    folder = RunFolder(tmp_path / "absent")  # stands for a read-only file system: the file cannot be opened to write
    with pytest.raises(RunFolderError, match=rf"cannot write run folder {folder.path}: .*; make it"), folder.lock():
        pytest.fail("entered a folder that is not there")
