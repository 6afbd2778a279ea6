"""What the command line prints: nothing where nobody reads any more, and one line when it is stopped."""

import contextlib
import errno
import io
import os
import subprocess
import sys

import pytest

from etude.cli.main import main


class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.parametrize("arguments", [["config", "show", "toy.yaml"], ["list"], ["--help"]])
def test_a_reader_that_went_away_is_no_error(etude, config, monkeypatch, arguments):
    config()
    monkeypatch.setattr(sys, "argv", ["etude", *arguments])
    errors = io.StringIO()
    with (
        contextlib.redirect_stdout(Closed()),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as caught,
    ):
        main()
    assert caught.value.code == 1
    assert errors.getvalue() == ""


def test_other_errors_keep_their_traceback(etude, config, monkeypatch):
    """An OSError that is not the output's is a mistake of the program."""
    path = config()

    def fail(*_arguments, **_options):
        raise OSError(errno.ENOSPC, "elsewhere")

    monkeypatch.setattr("etude.experiment.load_experiment_config", fail)
    with pytest.raises(OSError, match="elsewhere"):
        etude("config", "show", path)


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
