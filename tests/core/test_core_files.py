"""Files are whole or absent, whatever fails and whoever writes too; locks end with their process."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import etude
from etude.core.files import (
    FolderLock,
    LockHeld,
    NewFile,
    create_text,
    replacing,
    sync_folder,
    write_bytes,
    write_text,
)

WRITING = """
import sys
from pathlib import Path
from etude.core.files import NewFile
new = NewFile(Path(sys.argv[1]))
new.file.write(b"half")
new.file.flush()
print("writing", flush=True)
sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen:
    """Start a process that is in the middle of writing `path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    return process


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
@pytest.mark.parametrize("there", [True, False])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, operation, there):
    path = tmp_path / "a.json"
    if there:
        path.write_text("old")

    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "new")
    assert names(tmp_path) == (["a.json"] if there else [])
    assert not there or path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_file_and_folder_are_synced_in_this_order(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a, **k: (events.append("replace"), replace(*a, **k)))
    write_bytes(tmp_path / "a", b"new")
    file, renamed, folder = events
    assert file.parent == folder == tmp_path
    assert file.name.startswith(".a-")
    assert renamed == "replace"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_file_has_the_permissions_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "a", b"")
        (tmp_path / "b").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    path = tmp_path / "odd [name]*.bin"
    killed, living = start_writer(path), start_writer(path)
    try:
        kill(killed)
        assert len(names(tmp_path)) == 2
        write_bytes(path, b"mine")
        (left,) = [name for name in names(tmp_path) if name != path.name]
        assert (tmp_path / left).read_bytes() == b"half"
    finally:
        kill(living)
    write_bytes(path, b"again")
    assert names(tmp_path) == [path.name]
    assert path.read_bytes() == b"again"


def test_of_several_writers_at_once_one_wins_as_a_whole(tmp_path):
    path, sizes = tmp_path / "a", range(1, 9)

    def write(size: int) -> None:
        for _ in range(20):
            write_bytes(path, bytes([size]) * size * 1000)

    threads = [threading.Thread(target=write, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in [bytes([size]) * size * 1000 for size in sizes]
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_is_there_is_never_replaced_by_a_new_one(tmp_path, monkeypatch, has_links):
    def cannot(*args, **options):
        raise OSError(1, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", cannot)
    assert create_text(tmp_path / "a", "first")
    assert not create_text(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_of_several_that_create_a_file_at_once_one_does(tmp_path):
    created = []
    threads = [
        threading.Thread(target=lambda n=n: created.append(n) if create_text(tmp_path / "a", str(n)) else None)
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(n) for n in created] == [(tmp_path / "a").read_text()]


def test_a_full_disk_leaves_no_empty_file_that_keeps_others_out(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            create_text(tmp_path / "a", "mine")
    assert names(tmp_path) == []
    assert create_text(tmp_path / "a", "mine")


def test_a_discarded_file_is_gone(tmp_path):
    new = NewFile(tmp_path / "a")
    new.file.write(b"half")
    new.discard()
    assert names(tmp_path) == []


def test_a_file_system_that_cannot_sync_folders_is_no_reason_to_fail(tmp_path, monkeypatch):
    def cannot(descriptor):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", cannot)
    sync_folder(tmp_path)


# ------------------------------------------------------------------------------------------------ locks


def test_a_lock_is_held_once_and_says_by_whom(tmp_path):
    path = tmp_path / ".lock"
    with FolderLock(path), pytest.raises(LockHeld) as held, FolderLock(path):
        pytest.fail("entered twice")
    assert held.value.holder == str(os.getpid())
    with FolderLock(path):
        assert path.read_text().split() == [str(os.getpid())]


def test_a_lock_that_waits_is_entered_by_one_after_the_other(tmp_path):
    path, inside, most = tmp_path / ".lock", [], []

    def work() -> None:
        for _ in range(20):
            with FolderLock(path, wait=True, keep=False):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 120
    assert names(tmp_path) == []


def test_without_locks_in_the_file_system_work_goes_on(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(*args):
        raise OSError(37, "No locks available")

    left = tmp_path / ".a-00000000.tmp"
    left.touch()
    monkeypatch.setattr(fcntl, "flock", none)
    with FolderLock(tmp_path / ".lock", wait=True, keep=False):
        write_bytes(tmp_path / "a", b"new")
    assert names(tmp_path) == [left.name, "a"]  # it may be a living writer's


# ------------------------------------------------------------------------------------------------ one of each


def test_no_other_module_has_locks_or_atomic_writes_of_its_own():
    """Checkpoint folders are hashed and synced while they are written; a remote file's copy is filled in place.

    Network interfaces are asked for their address by fcntl.
    """
    root = Path(etude.__file__).parent
    own = re.compile(r"\b(flock|fcntl|fsync|mkstemp|NamedTemporaryFile)\b")
    found = {
        str(file.relative_to(root)) for file in root.rglob("*.py") if own.search(file.read_text(encoding="utf-8"))
    }
    assert found == {"core/files.py", "checkpoint/durable.py", "data/tokens/places.py", "distributed/network.py"}
