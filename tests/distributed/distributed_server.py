"""Starts the processes of a run by fork, in the way torchrun does, but without paying for imports each time.

Run as a program. Every line of stdin is a JSON request, answered by a JSON line on stdout:

    {"start": {"size": 2, "argv": ["train", "x.yaml"], "log": "folder"}}   ->  {"pids": [11, 12]}
    {"wait": {"timeout": 60}}                                             ->  {"codes": [0, 0], "timed_out": false}
    {"stop": {}}                                                          ->  {}, and the end

Each process runs the command line of etude, or with ["call", "name"] a function of `distributed_checks.py`,
`parallel_checks.py` or `sharded_checks.py`, with the variables torchrun would set. The rendezvous is held by this
process as it is by torchrun's agent, and what is printed goes to `folder/N.out` and `folder/N.err`. If one process
fails, the others have a while to notice by themselves before they are ended. With a size of 1 there is no torchrun.
"""

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import distributed_checks
import model_checks
import numpy.ctypeslib  # noqa: F401 - as above
import parallel_checks
import sharded_checks
import torch
import torch._dynamo  # wrapping a model imports it: here once, for all processes
import torch.distributed as dist

import etude.experiment.run  # noqa: F401 - what runs import, here once for all processes too
from etude.cli import main as cli
from etude.config import kinds, lookup, names
from etude.experiment import load_experiment_config

GRACE_S = 20
for kind in kinds():
    for name in names(kind):
        lookup(kind, name)


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def redirect(path: Path, descriptor: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, descriptor)
    os.close(file)


def run(rank: int, size: int, port: int, argv: list[str], log: Path, env: dict[str, str]) -> int:
    redirect(log / f"{rank}.out", 1)
    redirect(log / f"{rank}.err", 2)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.update(variables(rank, size, port) | env)
    sys.argv = ["etude", *argv]
    try:
        if argv[0] == "call":
            modules = (distributed_checks, model_checks, parallel_checks, sharded_checks)
            getattr(next(one for one in modules if hasattr(one, argv[1])), argv[1])()
        else:
            cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP: it cannot end by itself."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Launch:
    """The processes of one run."""

    def __init__(self, size: int, argv: list[str], log: str, env: dict[str, str] | None = None) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # They begin when all are forked: the store's threads must not be at work while this process forks, or a lock
        # that one of them holds is locked forever in the child.
        self.gate = os.pipe()
        self.pids = [self._fork(rank, size, argv, Path(log), env or {}) for rank in range(size)]
        for end in self.gate:
            os.close(end)
        self.codes: list[int | None] = [None] * size

    def _fork(self, rank: int, size: int, argv: list[str], log: Path, env: dict[str, str]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(self.gate[1])
                os.read(self.gate[0], 1)  # until the other end is closed everywhere
                os.close(self.gate[0])
                code = run(rank, size, self.store.port, argv, log, env)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        return pid

    def wait(self, timeout: float) -> dict[str, object]:
        """Wait for all of them; whatever is left at the end of the time is killed."""
        deadline = time.monotonic() + timeout
        timed_out = False
        while None in self.codes:
            self._collect()
            if any(self.codes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline and not timed_out:
                timed_out = True
                for pid in self._left():
                    os.kill(pid, signal.SIGUSR1)  # where it hangs goes to its stderr
                time.sleep(0.5)
            if timed_out or (any(self.codes) and all(map(is_stopped, self._left()))):  # as torchrun does, only sooner
                for pid in self._left():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        return {"codes": self.codes, "timed_out": timed_out}

    def _left(self) -> list[int]:
        return [pid for pid, code in zip(self.pids, self.codes, strict=True) if code is None]

    def _collect(self) -> None:
        for pid in self._left():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[self.pids.index(pid)] = os.waitstatus_to_exitcode(status)


def warm_up() -> None:
    """Read a config like those of the tests: what that imports and builds is there for all processes."""
    config = {"model": "lenet5", "data": "mnist", "callbacks": ["early_stopping"]}
    more = {"optimizer": {"name": "adamw", "lr": 0.01}, "scheduler": "warmup_cosine", "training": {"epochs": 1}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config | more))  # which is YAML too
        load_experiment_config(path)


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    gc.freeze()  # a collection in a fork would copy all pages
    launch: Launch | None = None
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            request = json.loads(line)
            if "start" in request:
                launch = Launch(**request["start"])
                answer: dict[str, object] = {"pids": launch.pids}
            elif "wait" in request:
                assert launch is not None
                answer, launch = launch.wait(**request["wait"]), None
            else:
                answer = {}
            print(json.dumps(answer), flush=True)
            if "stop" in request:
                break


if __name__ == "__main__":
    main()
