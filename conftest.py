"""Shared by all tests: few threads, so that parallel processes do not fight over cores, no deadlines, the command."""

import contextlib
import gc
import io
import logging
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GIT_DIR", os.devnull)  # every run asks for the commit: thousands of processes

import hypothesis
import numpy as np
import pytest
import torch

from etude.cli.main import main

for number in (signal.SIGINT, signal.SIGHUP):  # ignored where the tests were started by nohup or in the background
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU
# No deadline: how fast a machine is says nothing about the code. `make test-slow` takes the thorough profile.
hypothesis.settings.register_profile("etude", deadline=None, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=250)
hypothesis.settings.load_profile("etude")
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # where tmp_path is: no test needs a disk
gc.disable()


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        needing = [item for item in items if "gpu" in item.keywords]
        items[:] = [item for item in items if "gpu" not in item.keywords]
        config.hook.pytest_deselected(items=needing)


def pytest_collection_finish():
    gc.freeze()  # ten thousand tests and what they import: a collection would look at all of that again
    gc.enable()


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return self.err.splitlines()

    @property
    def error(self) -> str:
        """The one line on stderr; it is the whole complaint, in the form that all complaints have."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert len(self.errors) == 1, self.err
        line = self.errors[0]
        assert line.startswith("etude: "), line
        shown = line.replace(str(Path.cwd()), "")  # that folder may have any length; tests add components to lists
        assert len(shown) <= 400, f"{len(shown)} characters: {line}"
        assert "Traceback" not in line
        return line


@pytest.fixture
def etude(monkeypatch, tmp_path):
    """Run `etude ARGUMENTS` in an empty folder and return exit code, stdout and stderr."""
    logger = logging.getLogger("etude")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys.modules["__main__"], "__package__", None
    )  # or the command is called python -m pytest.etude
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ETUDE_DATA_DIR", raising=False)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["etude", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            else:
                code = 0
        return Outcome(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def tiny_mnist(monkeypatch):
    """Random images in place of the real ones, enough for the warm-up of the template."""
    rng = np.random.default_rng(0)
    names = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
    shapes = [(9000, 28, 28), (9000,), (60, 28, 28), (60,)]
    arrays = {
        name: rng.integers(0, 256 if len(shape) > 1 else 10, shape).astype(np.uint8)
        for name, shape in zip(names, shapes, strict=True)
    }
    monkeypatch.setattr("etude.data.catalog.mnist.fetch_mnist", lambda root=None, download=True: arrays)
