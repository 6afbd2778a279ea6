"""Errors that a user can cause. The command line prints one as a single message and exits with its code."""


class EtudeError(Exception):
    """A mistake the user can fix; the message says what was found and what to do next."""

    exit_code = 2
    reported_elsewhere = False
    """True if another process of the same run reports it, so that it is printed once."""


class ConfigError(EtudeError, ValueError):
    """A config file, override or argument that does not fit the schema."""


class DataError(EtudeError, ValueError):
    """Data that is missing, damaged or does not fit the model."""


class CheckpointError(EtudeError):
    """A checkpoint that is missing, damaged or made for another architecture."""


class RunFolderError(EtudeError, OSError):
    """A run folder that cannot be written, or that another process is writing."""


class TrainingError(EtudeError, RuntimeError):
    """Training cannot go on: numbers are not finite, memory has run out, a loss does not fit the model."""
