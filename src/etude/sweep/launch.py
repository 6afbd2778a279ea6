"""Starting the runs of trials as processes: forks of one that has torch, or started by `--nproc`. Imports no torch."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path

LOG = "output.txt"
"""File in a run folder with what its process printed."""
KILLING = {*signal.Signals} - {signal.SIGINT}
SIGNALLED = 128
"""Added to the number of a signal, the exit code of a launcher one of whose processes was killed by it."""
SERVER_LOST = 255
"""Python's exit code for a fork whose server was killed; the fork itself may still run."""


class TrialProcess:
    """The process of a run, or the one that starts several; what it prints is added to a file."""

    def __init__(self, log: Path) -> None:
        self._log, self._start = log, log.stat().st_size if log.exists() else 0

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        raise NotImplementedError

    def terminate(self) -> None:
        """Ask it to save and stop."""
        raise NotImplementedError

    def kill(self) -> None:
        """Stop it at once."""
        raise NotImplementedError

    def printed(self) -> str:
        """Return what it has printed so far."""
        try:
            return self._log.read_bytes()[self._start :].decode(errors="replace")
        except OSError:
            return ""


def start_server() -> None:
    """Start the process that imports torch, once; it ends with this one."""
    set_forkserver_preload(["etude.sweep.trial", "etude.cli.main"])
    if threading.current_thread() is not threading.main_thread():
        ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the sweep, not for this import
    try:
        ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def start_run(
    experiment: str, overrides: Sequence[str], run_dir: Path, *, nproc: int, devices: str | None
) -> TrialProcess:
    """Train a run in a process of its own, or in `nproc`, or continue it if it has begun.

    `devices` are the CUDA devices it sees; None means all.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / LOG
    environment = {**os.environ, **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})}
    if nproc == 1:
        return _Forked(log, experiment, list(overrides), str(run_dir), str(log), environment)
    command = [sys.executable, "-m", "etude", "resume", str(run_dir)]
    if not (run_dir / "config.yaml").exists():
        command[-2:] = ["train", experiment, *overrides, "--run-dir", str(run_dir)]
    return _Launched([*command, "-q", "--nproc", str(nproc)], log, environment)


def wait_for(processes: Sequence[TrialProcess], timeout_s: float) -> None:
    """Wait until one of the processes ends, at most this long."""
    sentinels = [one.process.sentinel for one in processes if isinstance(one, _Forked)]
    wait(sentinels, timeout_s)


class _Forked(TrialProcess):
    """A run as a fork of the process with torch."""

    def __init__(self, log: Path, *arguments: object) -> None:
        from etude.sweep.trial import run_trial

        super().__init__(log)
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=run_trial, args=arguments)
        self.process.start()

    def poll(self) -> int | None:
        code = self.process.exitcode
        return -signal.SIGKILL if code == SERVER_LOST else code

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()


class _Launched(TrialProcess):
    """A run of several processes, started by etude."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        super().__init__(log)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return the exit code, negative if one of the processes was killed; 130 is an interrupt."""
        code = self.process.poll()
        return SIGNALLED - code if code is not None and code - SIGNALLED in KILLING else code

    def printed(self) -> str:
        """Return what the processes have printed, without their ranks and what the launcher says of their end."""
        lines = re.sub(r"^\[rank\d+\]: ?", "", super().printed(), flags=re.MULTILINE).split("\n")
        return "\n".join(one for one in lines if not one.startswith("etude: process "))

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        """Stop it with all its processes and theirs."""
        groups = _children(self.process.pid) if self.process.poll() is None else []
        self.process.kill()
        for group in groups:  # each is a session of its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def _children(parent: int) -> list[int]:
    """Return the processes that a process has started; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                found.append(int(path.parent.name))
    return found


def devices_of(slot: int, nproc: int, count: int) -> str | None:
    """Return the CUDA devices of the trial in this slot, of `count`, in turn; None if there are too few to choose.

    >>> [devices_of(slot, 1, 2) for slot in range(3)], devices_of(1, 2, 4), devices_of(0, 1, 1)
    (['0', '1', '0'], '2,3', None)
    """
    if count <= nproc:
        return None
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) == count else [str(one) for one in range(count)]
    return ",".join(names[(slot * nproc + one) % count] for one in range(nproc))
