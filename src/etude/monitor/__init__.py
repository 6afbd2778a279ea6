"""The run folder, and the sinks that records and events go to."""

from etude.monitor.environment import collect_environment
from etude.monitor.run_folder import FINISHED, RunFolder, default_run_dir, newest_run
from etude.monitor.sinks import EventLog, JsonlSink

__all__ = [
    "FINISHED",
    "EventLog",
    "JsonlSink",
    "RunFolder",
    "collect_environment",
    "default_run_dir",
    "newest_run",
]
