"""What a process knows of the `etude … --nproc` that started it. Imports no torch: a process asks this first."""

import contextlib
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

LAUNCHER = "ETUDE_LAUNCHER"
"""Variable with the process id of the launcher."""
SHAPE = "ETUDE_LAUNCH_OPTIONS"
"""Variable with the options that start as many processes again."""
STOP_FILE = "ETUDE_STOP_FILE"
"""Variable with a file that gets a byte with each signal to the launcher: a process hears none in a collective."""
HUNG = 70
"""Exit code by which a process tells such a launcher that the run hung; the launcher restarts it, or exits with 1."""


def is_launched() -> bool:
    """Whether `etude … --nproc` started this process."""
    return os.environ.get(LAUNCHER, "") == str(os.getppid())


def is_asked_to_stop() -> bool:
    """Whether the launcher that started this process was asked to stop; any thread may ask this."""
    return is_launched() and Path(os.environ[STOP_FILE]).exists()


def is_asked_once() -> bool:
    """Whether the launcher has got one signal: a second one here is the same, sent to all processes of the job."""
    return is_asked_to_stop() and Path(os.environ[STOP_FILE]).stat().st_size == 1


def is_first(name: str) -> bool:
    """Whether this process is the first one of its machine to ask this: for what only one of them reports.

    Under another launcher than ours it is always the same process.
    """
    if not is_launched():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        Path(os.environ[STOP_FILE]).with_name(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the disk is full: doing it twice is better than not at all
        return True
    return True


def launch_id() -> str:
    """Return an id of the elastic agent that started this process and may start it again; empty if there is none.

    An agent is a process of ours or of torchrun. Its id is the same for all processes that it starts, and no other
    agent has it: a run id, which a user may choose, would be found again in later launches.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return _process_id(os.getppid())


def process_id() -> str:
    """Return an id of this process that no other process has, also not a later one with its number."""
    return _process_id(os.getpid())


def _process_id(number: int) -> str:
    try:
        began = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # not on Linux
        began = ""
    return hashlib.sha256(f"{socket.gethostname()} {number} {began}".encode()).hexdigest()[:16]


def end_with_launcher() -> None:
    """Let this process be killed when its launcher dies, which could not end it any more (on Linux)."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux" or "RANK" not in os.environ:
        return
    import ctypes

    if not is_launched() and Path("/proc", launcher).exists():  # a command that one of its processes runs
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if not is_launched():  # it died before
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Let SIGINT wait for a while, also in processes that are started meanwhile."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accept_interrupts() -> None:
    """Let SIGINT reach this process: its launcher has blocked it, since an import that is interrupted may abort."""
    if is_launched() and hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
