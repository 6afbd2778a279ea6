"""What a process knows of the `etude … --nproc` that started it. Imports no torch: a process asks this first."""

import os
import signal
import sys

LAUNCHER = "ETUDE_LAUNCHER"
"""Variable with the process id of the launcher."""
SHAPE = "ETUDE_LAUNCH_OPTIONS"
"""Variable with the options that start as many processes again."""


def is_launched() -> bool:
    """Whether `etude … --nproc` started this process."""
    return os.environ.get(LAUNCHER, "") == str(os.getppid())


def end_with_launcher() -> None:
    """Let this process be killed when its launcher dies, which could not end it any more (on Linux)."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux" or "RANK" not in os.environ:
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before
        os.kill(os.getpid(), signal.SIGKILL)
