"""Recorded and compiled steps on the CPU, and signals that a run sends itself at a moment of that."""

import os
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from etude.engine.capture import Capture
from etude.engine.compiled import CompiledTask
from etude.trainer import optimization
from etude.trainer.machine import Machine
from stub_recorder import RunAgain

POINTS = {
    "capture": ("timed", "record", "recorded", "check", "replay", "replayed", "checked"),
    "compile": ("begin", "backend", "run", "ran"),
}
"""Moments of the first recording and comparison, or of the first compilation."""


class Moments:
    """Sends signals to this process when a moment comes for the first time."""

    def __init__(self, at: str = "", signals: tuple[int, ...] = ()) -> None:
        self.at, self.signals, self.seen = at, signals, []

    def come(self, moment: str) -> None:
        if moment not in self.seen and moment == self.at:
            for number in self.signals:
                os.kill(os.getpid(), number)
        self.seen.append(moment)

    def around(self, function, before: str, after: str = ""):
        def call(*args):
            self.come(before)
            result = function(*args)
            self.come(after or before)
            return result

        return call


def captured(moments: Moments, step, *, needed: bool) -> Capture:
    recorder = RunAgain(step)
    record = recorder.record

    def watched(function, random):
        result, replay = record(moments.around(function, "record", "recorded"), random)
        return result, moments.around(replay, "replay", "replayed")

    recorder.record = watched
    recorder.timed = moments.around(recorder.timed, "timed")
    capture = Capture(step, recorder, needed=needed)
    capture._check = moments.around(capture._check, "check", "checked")
    return capture


def compiled(moments: Moments, *args, **options) -> CompiledTask:
    def backend(graph, _inputs):
        moments.come("backend")
        return moments.around(graph, "run", "ran")

    task = CompiledTask(*args, backend=backend, **options)
    task._begin = moments.around(task._begin, "begin")
    return task


def prepare(how: str, at: str = "", signals: tuple[int, ...] = ()) -> Moments:
    """Let the runs of this process be recorded or compiled, and be sent signals at a moment."""
    moments = Moments(at, tuple(signals))
    if how == "capture":
        Machine.captures = lambda _self, mode: mode != "off"
        optimization.Capture = partial(captured, moments)
    else:
        optimization.CompiledTask = partial(compiled, moments)
    return moments
