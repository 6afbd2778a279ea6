"""Processes that run `etude` commands, and what a run leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from run_files import records, steady, weights

HERE = Path(__file__).parent
STEPS_PER_EPOCH, EPOCHS, SAVE_EVERY = 12, 3, 3


@dataclass
class Process:
    """A running `etude` command."""

    server: "Server"
    pid: int
    out_path: Path
    err_path: Path

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return self.server.ask({"wait": self.pid})

    def kill(self) -> int:
        self.send(signal.SIGKILL)
        return self.wait()

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        """What was said on stderr, but for the modules that a resumed run imports."""
        lines = self.err_path.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("etude: running /"))


class Server:
    """Starts commands as forks of one process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "faults_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def ask(self, request: dict[str, object]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server is gone"
        return int(line)

    def start(self, *arguments: object, **request: object) -> Process:
        self.count += 1
        out, err = (self.folder / f"{self.count}.{stream}" for stream in ("out", "err"))
        out.touch()
        err.touch()
        words = [str(argument) for argument in arguments]
        return Process(self, self.ask({"start": words, "out": str(out), "err": str(err), **request}), out, err)

    def run(self, *arguments: object, **request: object) -> tuple[int, Process]:
        process = self.start(*arguments, **request)
        return process.wait(), process

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()  # the end of its input may not reach it: workers of other tests hold the pipe as well
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Reference:
    """A run that nothing disturbed, and how long it took."""

    folder: Path
    seconds: float


def facts(folder: Path) -> dict[str, object]:
    """Everything a run leaves that does not depend on how fast it was."""
    last = folder / "checkpoints" / "last"
    result = json.loads((folder / "result.json").read_text())
    return {
        "model": weights(folder),
        "optimizer and random generators": (last / "state.safetensors").read_bytes(),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").glob("step-*")),
        "links": [(folder / "checkpoints" / name).readlink().name for name in ("last", "best")],
        "metrics.jsonl": records(folder),
        "result.json": {**result, "metrics": steady(result["metrics"])},
    }


def wait_for(condition: Callable[[], object], process: Process | None = None) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain" + (f": {process.err}" if process else "")
        time.sleep(0.002)
