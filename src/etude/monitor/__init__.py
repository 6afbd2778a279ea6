"""The run folder, the events of a run, and readers for other processes. Reading needs no torch."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.monitor.environment import collect_environment
    from etude.monitor.events import (
        CheckpointSaved,
        EpochEnded,
        EpochStarted,
        Event,
        MediaLogged,
        Noted,
        PhaseStarted,
        Recovered,
        RunEnded,
        RunStarted,
        StepsLogged,
        Validated,
        Warned,
    )
    from etude.monitor.jsonl import JsonlSink
    from etude.monitor.live import Monitor, RunStatus
    from etude.monitor.run_folder import FINISHED, RunFolder, default_run_dir, newest_run

__all__ = [
    "FINISHED",
    "CheckpointSaved",
    "EpochEnded",
    "EpochStarted",
    "Event",
    "JsonlSink",
    "MediaLogged",
    "Monitor",
    "Noted",
    "PhaseStarted",
    "Recovered",
    "RunEnded",
    "RunFolder",
    "RunStarted",
    "RunStatus",
    "StepsLogged",
    "Validated",
    "Warned",
    "collect_environment",
    "default_run_dir",
    "newest_run",
]

__getattr__ = load_late(__name__, __file__)
