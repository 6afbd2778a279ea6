"""The command line as a process: errors in words, signals that stop it, and output that cannot be written."""

import atexit
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_MAX_LINE = 2000
"""Maximum length of an error message."""


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Print errors that a user can cause, one line each, with exit code 2; other errors keep their traceback."""
    try:
        yield
    except Exception as error:
        from etude.core.errors import EtudeError

        if not isinstance(error, EtudeError):
            raise
        for line in () if error.reported_elsewhere else (*str(error).splitlines(), *getattr(error, "__notes__", ())):
            complain(line)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        if is_main():
            complain("; ".join(["stopped at once", *getattr(stop, "__notes__", ())]))
        raise SystemExit(130) from None


def is_main() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def complain(line: str) -> None:
    """Print one line about a problem."""
    # Import nothing of the library here: it would load torch, whose import may be what was interrupted.
    line = line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 1]}…"
    with contextlib.suppress(OSError):  # the terminal is gone or the disk is full: there is nowhere to print
        print(f"etude: {line}", file=sys.stderr, flush=True)


class WarningLines(logging.Handler):
    """Prints log messages of the library in the same form as errors."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        complain(record.getMessage())


class WatchedOutput:
    """Standard output that records whether writing failed."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> Any:
        """Write like any file."""
        return self._try(self.stream.write, text)

    def flush(self) -> None:
        """Flush like any file."""
        self._try(self.stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _try(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except OSError as error:
            self.error = error
            raise


def ignore_signals() -> None:
    """Let the process end in peace: a signal in its last second would make a finished run look stopped."""
    _ignore_signals()
    atexit.register(_ignore_signals)  # `signals_stop` restores what was before it


def _ignore_signals() -> None:
    for number in _stopping():
        signal.signal(number, signal.SIG_IGN)


def _stopping() -> list[int]:
    """Return the signals that stop a run; none in a thread, which cannot handle them."""
    names = ("SIGINT", "SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


@contextlib.contextmanager
def signals_stop() -> Iterator[None]:
    """Make SIGTERM and SIGHUP stop like Ctrl-C, with one line and exit code 130, also during setup."""
    process = os.getpid()

    def stop(number: int, _frame: Any) -> None:
        if os.getpid() != process:  # in a forked child, restore the default behaviour
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise KeyboardInterrupt

    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # so that a launcher can end its processes
    before = {number: signal.getsignal(number) for number in _stopping()}
    for number, handler in before.items():
        if alone and handler is signal.SIG_DFL:  # unless nohup ignores it
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else not Python's
                signal.signal(number, handler)


@contextlib.contextmanager
def watched_output() -> Iterator[None]:
    """Report in one line that standard output cannot be written; say nothing if the reader closed the pipe."""
    if sys.stdout is None:  # closed from the start: Python prints nothing
        yield
        return
    watched: Any = WatchedOutput(sys.stdout)
    sys.stdout = watched
    try:
        try:
            yield
        finally:
            watched.flush()
    except OSError as error:
        if watched.error is not error:
            raise
        if error.errno == errno.EPIPE:
            raise SystemExit(1) from None
        complain(f"cannot write the output: {error.strerror}; redirect it elsewhere")
        raise SystemExit(2) from None
    finally:
        # Python flushes its output again at exit, and would print its own error.
        sys.stdout = watched.stream if watched.error is None else io.StringIO()
