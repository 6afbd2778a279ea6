"""Where a callback writes: relative paths lie in the run folder, if the run has one."""

from pathlib import Path

from etude.engine.callback import RunInfo


def resolve(path: str | Path, run: RunInfo | None) -> Path:
    """Return `path`, inside the run folder if it is relative and there is one; so parallel runs do not collide."""
    if run is not None and run.run_dir is not None:
        return run.run_dir / path
    return Path(path)
