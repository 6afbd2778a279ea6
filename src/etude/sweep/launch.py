"""Starting the runs of trials as processes: forks of one that has torch, or started by `--nproc`. Imports no torch."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path
from typing import Protocol

LOG = "output.txt"
"""File in a run folder with what its process printed."""


class TrialProcess(Protocol):
    """The process of a run; it is that of `subprocess`."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""

    def terminate(self) -> None:
        """Ask it to save and stop."""

    def kill(self) -> None:
        """Stop it at once."""


def start_server() -> None:
    """Start the process that imports torch, once; it ends with this one."""
    set_forkserver_preload(["etude.sweep.trial", "etude.cli.main"])
    ensure_running()


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
        return _Forked(experiment, list(overrides), str(run_dir), str(log), environment)
    command = [sys.executable, "-m", "etude", "resume", str(run_dir)]
    if not (run_dir / "config.yaml").exists():
        command[-2:] = ["train", experiment, *overrides, "--run-dir", str(run_dir)]
    with log.open("ab") as file:
        return subprocess.Popen(
            [*command, "-q", "--nproc", str(nproc)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def wait_for(processes: Sequence[TrialProcess], timeout_s: float) -> None:
    """Wait until one of the processes ends, at most this long."""
    sentinels = [one.process.sentinel for one in processes if isinstance(one, _Forked)]
    wait(sentinels, timeout_s)


class _Forked:
    """A run as a fork of the process with torch."""

    def __init__(self, *arguments: object) -> None:
        from etude.sweep.trial import run_trial

        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=run_trial, args=arguments)
        self.process.start()
        self.terminate, self.kill = self.process.terminate, self.process.kill

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self.process.exitcode


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
