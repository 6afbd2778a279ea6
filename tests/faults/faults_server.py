"""Starts `etude` commands in processes that need no time to import anything: forks of this one.

Prints a line when it is ready. Reads one JSON request per line and answers each with one line: {"start": [arguments],
"out": file, "err": file} gives a process number, {"wait": number} its exit code (negative: the signal that killed it).
With "lives": n the process kills itself before it changes the disk for the (n+1)-th time; with "max_file_bytes": n it
cannot make a file larger than that; with "speed": {"how", "at", "signals"} its steps are captured or compiled, and it
sends itself signals at a moment of that.
"""

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from functools import cache
from pathlib import Path

import faults_speed
import torch

from etude.cli.main import main
from etude.experiment import load_experiment_config

PATIENCE_S = 180
OPERATIONS = ("open", "write", "ftruncate", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir")


class Mortal:
    """Lets so many operations on files through; the next one is `kill -9`."""

    def __init__(self, lives: int) -> None:
        self.lives, self.spent = lives, 0
        for name in OPERATIONS:
            setattr(os, name, self.guard(getattr(os, name)))

    def guard(self, function):
        def call(*args, **kwargs):
            if self.spent == self.lives:
                os.kill(os.getpid(), signal.SIGKILL)
            self.spent += 1
            return function(*args, **kwargs)

        return call


def run_command(arguments: list[str], out: str, err: str) -> int:
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    warnings.simplefilter("error")
    signal.alarm(PATIENCE_S)  # the tests may be gone: nothing here outlives them for long
    sys.argv = ["etude", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(request) -> int:
    if request.get("speed", {}).get("how") == "compile":
        load_compiler()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        if "max_file_bytes" in request:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["max_file_bytes"],) * 2)
        moments = faults_speed.prepare(**request["speed"]) if "speed" in request else None
        mortal = Mortal(request["lives"]) if "lives" in request else None
        code = run_command(request["start"], request["out"], request["err"])
        if mortal is not None:
            print("operations", mortal.spent)
        if moments is not None:
            print("moments", *dict.fromkeys(moments.seen))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


@cache
def load_compiler() -> None:
    """Import what a first compilation does, for the processes that compile."""
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1)).sum().backward()
    torch.compiler.reset()


def warm_up() -> None:
    """Read a config like those of the tests: what that imports and builds is there for all processes."""
    config = {"model": "lenet5", "data": "mnist"}
    more = {"optimizer": {"name": "adamw", "lr": 0.01}, "scheduler": "warmup_cosine", "training": {"epochs": 1}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config | more))  # which is YAML too
        load_experiment_config(path)


def serve() -> None:
    torch.set_num_threads(1)
    warm_up()
    gc.freeze()  # a collection in a fork would copy all pages
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = start(request)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
