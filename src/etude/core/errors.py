"""Errors that a user can cause. The command line prints one as a single message and exits with its code."""


class EtudeError(Exception):
    """A mistake that the user can fix; the message says what was found and what to do."""

    exit_code = 2
    reported_elsewhere = False
    """True if another process of the run reports this error, so that it is printed only once."""


class ConfigError(EtudeError, ValueError):
    """A config file, override or argument that does not fit the schema."""


class DataError(EtudeError, ValueError):
    """Data that is missing, damaged or does not fit the model."""


class CheckpointError(EtudeError):
    """A checkpoint that is missing, damaged or made for another architecture."""


class RunFolderError(EtudeError, OSError):
    """A run folder that cannot be written, or that another process is writing."""


class TrainingError(EtudeError, RuntimeError):
    """Training cannot continue: non-finite values, out of memory, or a loss that does not fit the model."""


class ConnectionLost(TrainingError):
    """Another process of the run cannot be reached: retrying may go better, so launchers restart the processes."""

    exit_code = 75
