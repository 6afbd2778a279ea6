"""Helpers of the tests: start the processes of a run, write experiments, and read what they leave behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
TIMEOUT_S = 90


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended, and what they said."""

    codes: list[int]
    out: list[str]
    err: list[str]

    @property
    def said(self) -> list[str]:
        """The lines on stderr of all processes that are etude's."""
        return [line for text in self.err for line in text.splitlines() if line.startswith("etude:")]

    def ok(self) -> "Ended":
        assert set(self.codes) == {0}, self
        assert not any(self.err), self.err
        return self


def without_announcements(text: str) -> str:
    """Leave out what a resumed run says of the toy modules that its config imports."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("etude: running /"))


class Server:
    """Talks to `distributed_server.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "distributed_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run(self, size: int, argv: list[Any], log: Path, env: dict[str, str] | None = None) -> Ended:
        log.mkdir(parents=True, exist_ok=True)
        self._ask(start={"size": size, "argv": [str(one) for one in argv], "log": str(log), "env": env})
        answer = self._ask(wait={"timeout": TIMEOUT_S})
        texts = [[(log / f"{rank}.{kind}").read_text() for rank in range(size)] for kind in ("out", "err")]
        ended = Ended(answer["codes"], texts[0], [without_announcements(text) for text in texts[1]])
        assert not answer["timed_out"], f"a process did not end by itself: {ended}"
        return ended

    def close(self) -> None:
        # Asked, not only cut off: a process that another test forked may hold a copy of the pipe.
        self._ask(stop={})
        self._process.communicate(timeout=TIMEOUT_S)


class Runs:
    """Runs of experiments in a folder of their own, each by any number of processes."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.root = server, root

    def write(self, name: str, training: dict[str, Any], **sections: Any) -> Path:
        """Write an experiment: a small net on points, unless the sections say otherwise."""
        config = {
            "imports": [str(HERE / "distributed_toy.py")],
            "model": {"name": "toy_net"},
            "data": {"name": "toy_classes"},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "scheduler": None,
            "training": {"epochs": 3, "batch_size": 8, "log_interval": 1, "device": "cpu", **training},
            **sections,
        }
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def train(self, size: int, config: Path, *arguments: Any, name: str | None = None) -> tuple[Path, Ended]:
        folder = self.root / (name or f"{config.stem}-{size}")
        command = ["train", config, *arguments, "--quiet", "--run-dir", folder]
        return folder, self.server.run(size, command, self.root / "logs" / folder.name)

    def resume(self, size: int, folder: Path, *arguments: Any) -> Ended:
        command = ["resume", folder, *arguments, "--quiet"]
        return self.server.run(size, command, self.root / "logs" / f"{folder.name}-resumed")

    def call(self, size: int, check: str, env: dict[str, str] | None = None) -> Ended:
        """Call a function of `distributed_checks.py` or `sharded_checks.py` in several processes."""
        return self.server.run(size, ["call", check], self.root / "logs" / check, env)
