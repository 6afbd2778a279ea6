"""One run of a trial, in a process that was forked from one with torch: see `launch`."""

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.core.errors import EtudeError
from etude.experiment.run import resume_run, train_experiment
from etude.monitor import RunFolder

INTERRUPTED = 130


def run_trial(
    experiment: str, overrides: Sequence[str], run_dir: str, log: str, environment: Mapping[str, str]
) -> None:
    """Do what `etude train`, or `etude resume`, does in a process of its own; its output goes to a file."""
    os.setsid()  # Ctrl-C is for the sweep, which then asks its trials to save
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for one in (1, 2):
        os.dup2(descriptor, one)
    logging.basicConfig(format="etude: %(message)s", level=logging.WARNING)
    raise SystemExit(_train(experiment, overrides, Path(run_dir)))


def _train(experiment: str, overrides: Sequence[str], run_dir: Path) -> int:
    """Return the exit code of a run."""
    try:
        if RunFolder(run_dir).holds_run:
            outcome = resume_run(run_dir, progress=False)
        else:
            outcome = train_experiment(experiment, overrides, run_dir=run_dir, progress=False)
    except EtudeError as error:
        os.write(2, "".join(f"etude: {line}\n" for line in str(error).splitlines()).encode())
        return error.exit_code
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        return 1
    return INTERRUPTED if outcome.status == "interrupted" else 0


def _stop_with_parent() -> None:
    """Save and stop when the sweep was killed."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
