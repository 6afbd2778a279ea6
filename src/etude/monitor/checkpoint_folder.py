"""A run's checkpoint folder if a setting names it: its location, and that it belongs to only one run."""

import os
from pathlib import Path
from typing import Any

from etude.core import ConfigError, RunFolderError
from etude.core.files import create_text, write_text
from etude.core.run_layout import CHECKPOINTS, OWN_FILES, REPLACED, is_made, original_name, step_of

OWNER = ".run"
"""File in a checkpoint folder outside the run folder: it contains the path of the run folder."""


def checkpoint_folder(run: Path, setting: str | None) -> Path:
    """Return the folder that `training.checkpoint_dir` names; a relative one is inside the run folder.

    Raises ConfigError if it is the run folder itself, contains it, or is one of its files.
    """
    if setting is None:
        return run / CHECKPOINTS
    path = run / Path(setting).expanduser()
    real, base = Path(os.path.realpath(path)), Path(os.path.realpath(run))
    inside = real.relative_to(base).parts[0].casefold() if base in real.parents else ""
    if not setting.strip() or real == base or real in base.parents or inside in OWN_FILES:
        raise ConfigError(
            f"training.checkpoint_dir is {setting!r}, which would mix checkpoints with the run's other files; "
            f"choose a separate folder, such as weights or /scratch/weights"
        )
    return path


def setting_in(config: Path) -> str | None:
    """Return `training.checkpoint_dir` of a config file; None if it has none or cannot be read."""
    from etude.config import read_config

    try:
        training: Any = read_config(config).data.get("training")
    except (ConfigError, OSError):
        return None  # the code that loads the config reports the problem
    setting = training.get("checkpoint_dir") if isinstance(training, dict) else None
    return setting if isinstance(setting, str) else None


def claim(folder: Path, run: Path, *, new: bool) -> None:
    """Check that no other run keeps its checkpoints in `folder`, and record that `run` does.

    If its recorded run no longer exists, a resumed run takes the folder over, since it was probably moved. Raises
    RunFolderError if the folder belongs to another run, or if the run is `new` and the folder holds other
    checkpoints.
    """
    if is_owned(folder, run):
        return
    mine = os.path.realpath(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = _owner(folder)
        taken = owner is not None and Path(owner).is_dir()
        if taken or (new and any(step_of(path.name) is not None for path in folder.iterdir())):
            whose = f"those of the run {owner}" if owner is not None else "checkpoints"
            raise RunFolderError(f"{folder} already holds {whose}; choose another training.checkpoint_dir")
        if owner is not None:
            write_text(folder / OWNER, f"{mine}\n")
        elif not create_text(folder / OWNER, f"{mine}\n") and _owner(folder) != mine:
            raise RunFolderError(f"{folder} was just claimed by another run; choose another training.checkpoint_dir")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {folder}: {error.strerror or error}; choose a training.checkpoint_dir that can be written"
        ) from error


def is_owned(folder: Path, run: Path) -> bool:
    """Return whether a folder is known to belong to the run: it is inside the run folder, or its file says so."""
    real = os.path.realpath(run)
    return Path(real) in Path(os.path.realpath(folder)).parents or _owner(folder) == real


def made_in(folder: Path, run: Path) -> list[str]:
    """Return the names in a checkpoint folder that the run has created; none if the folder is not its own."""
    if not folder.is_dir() or not is_owned(folder, run):
        return []
    return sorted(path.name for path in folder.iterdir() if is_made(path.name))


def holds_checkpoints(folder: Path, run: Path) -> bool:
    """Return whether the run has saved: in `folder`, or in the run folder with another `training.checkpoint_dir`."""
    return any(map(_is_checkpoint, made_in(folder, run))) or _holds_any(run)


def _holds_any(run: Path) -> bool:
    for folder, inside, files in os.walk(run):
        if Path(folder) != run and not {"config.yaml", ".lock", OWNER}.isdisjoint(files):
            inside.clear()  # another run, or the checkpoints of one
        elif any(map(_is_checkpoint, inside)):
            return True
    return False


def _is_checkpoint(name: str) -> bool:
    return step_of(original_name(name) if name.startswith(REPLACED) else name) is not None


def _owner(folder: Path) -> str | None:
    try:
        return (folder / OWNER).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
