"""The lock of a run folder: one process at a time, freed when that process dies in any way."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from etude.core import RunFolderError
from etude.monitor import RunFolder

FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def hold(folder: Path, how: str, said: Connection, end: Connection) -> None:
    """Hold the lock until there is something to read."""
    with RunFolder(folder).lock():
        child = -1 if how == "alone" else os.fork()
        if child == 0 and how == "child ends":
            sys.exit()  # leaves the block, as a worker that ends in an orderly way does
        if child > 0 and how == "child ends":
            assert os.waitpid(child, 0)[1] == 0
        if child != 0 and how != "child stays":
            said.send(child)
        if child == 0:  # it runs, so that it has given up what is the parent's
            said.send(os.getpid())
        end.poll(None)


@pytest.fixture
def holder():
    """Start a process that holds the lock, and return it with the child it may have forked."""
    (heard, said), (reading, writing) = FORK.Pipe(duplex=False), FORK.Pipe(duplex=False)
    started = []

    def start(folder: Path, how: str = "alone") -> tuple[BaseProcess, int]:
        process = FORK.Process(target=hold, args=(folder, how, said, reading))
        process.start()
        started.append(process)
        return process, heard.recv()

    yield start
    writing.send("end")  # nobody takes it: all that wait go on
    for process in started:
        process.join()
    for end in (heard, said, reading, writing):
        end.close()


def test_second_process_is_refused_until_the_first_is_killed(tmp_path, holder):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({})
    process, _ = holder(folder.path)
    message = rf"run folder .*run is in use by process {process.pid}; .* --run-dir"
    with pytest.raises(RunFolderError, match=message), folder.lock():
        pytest.fail("entered a folder that is in use")
    with pytest.raises(RunFolderError, match=message):
        RunFolder.create(folder.path, overwrite=True)
    assert folder.holds_run
    process.kill()
    process.join()
    with folder.lock():
        assert folder.lock_path.read_text() == f"{os.getpid()}\n"


def test_a_forked_worker_does_not_keep_the_lock_of_its_dead_parent(tmp_path, holder):
    folder = RunFolder.create(tmp_path / "run")
    process, child = holder(folder.path, "child stays")
    process.kill()
    process.join()
    os.kill(child, 0)  # it lives
    with folder.lock():
        pass


def test_the_lock_survives_a_forked_child_that_ends(tmp_path, holder):
    folder = RunFolder.create(tmp_path / "run")
    process, _ = holder(folder.path, "child ends")
    with pytest.raises(RunFolderError, match=f"process {process.pid}"), folder.lock():
        pytest.fail("entered a folder that is in use")


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
