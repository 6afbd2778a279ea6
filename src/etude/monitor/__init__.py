"""The run folder, the events of a run, and readers for other processes. Reading needs no torch."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.monitor.environment import collect_environment as collect_environment
    from etude.monitor.events import (
        CheckpointSaved as CheckpointSaved,
        EpochEnded as EpochEnded,
        EpochStarted as EpochStarted,
        Event as Event,
        MediaLogged as MediaLogged,
        Noted as Noted,
        PhaseStarted as PhaseStarted,
        Recovered as Recovered,
        RunEnded as RunEnded,
        RunStarted as RunStarted,
        StepsLogged as StepsLogged,
        Validated as Validated,
        Warned as Warned,
    )
    from etude.monitor.jsonl import JsonlSink as JsonlSink
    from etude.monitor.live import Monitor as Monitor, RunStatus as RunStatus
    from etude.monitor.run_folder import (
        FINISHED as FINISHED,
        RunFolder as RunFolder,
        default_run_dir as default_run_dir,
        newest_run as newest_run,
    )

__getattr__ = load_late(__name__, __file__)
