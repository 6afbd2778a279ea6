"""Standard output that cannot be written: one line and exit code 2, or silence where nobody reads any more."""

import contextlib
import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli.main import main


class Broken(io.StringIO):
    """A stream that fails as a full disk or a closed pipe does."""

    def __init__(self, code: int, at: str) -> None:
        super().__init__()
        self.problem, self.at = OSError(code, os.strerror(code)), at

    def write(self, text: str) -> int:
        if self.at == "write":
            raise self.problem
        return len(text)

    def flush(self) -> None:
        if self.at == "flush":
            raise self.problem


@pytest.mark.parametrize("at", ["write", "flush"])
@pytest.mark.parametrize("arguments", [["config", "show", "toy.yaml"], ["list"], ["--help"]])
@pytest.mark.parametrize(("code", "end", "lines"), [(errno.ENOSPC, 2, 1), (errno.EPIPE, 1, 0)])
def test_output_that_cannot_be_written(etude, config, monkeypatch, at, arguments, code, end, lines):
    config()
    monkeypatch.setattr(sys, "argv", ["etude", *arguments])
    errors = io.StringIO()
    with (
        contextlib.redirect_stdout(Broken(code, at)),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as caught,
    ):
        main()
    assert caught.value.code == end
    assert len(errors.getvalue().splitlines()) == lines
    assert errors.getvalue().count("No space left on device") == lines


def test_other_errors_keep_their_traceback(etude, config, monkeypatch):
    """An OSError that is not the output's is a mistake of the program."""
    path = config()

    def fail(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "elsewhere")

    monkeypatch.setattr("etude.experiment.load_experiment_config", fail)
    with pytest.raises(OSError, match="elsewhere"):
        etude("config", "show", path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_device_of_the_system():
    """Python's own complaint at exit does not appear either."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "etude", "config", "schema"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv = ["etude", "train", "lenet5/baseline"]
from etude.cli.main import main
main()
"""


def test_a_signal_while_torch_is_imported_stops_with_one_line():
    """Torch must not be imported a second time to say so: half of it is there, and it may crash the process."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (130, "etude: stopped at once\n")
