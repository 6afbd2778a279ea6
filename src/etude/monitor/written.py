"""The list of files that a run has written under names that are not fixed, so that they can be removed with it."""

import os
from collections.abc import Iterable
from pathlib import Path

LIST = ".written"
_EVENT_FILES = "tensorboard/**/events.out.tfevents.*"
"""What TensorBoard's writer makes; it names its files itself."""


def note_written(folder: Path, names: Iterable[str]) -> None:
    """Add paths, relative to the run folder, to its list."""
    known = set(_listed(folder))
    if new := [name for name in names if name not in known]:
        with (folder / LIST).open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in new)


def remove_written(folder: Path) -> None:
    """Remove the listed files, TensorBoard's, the folders that are then empty, and the list.

    A list is data: a path that leads out of the run folder is left alone, and so is a folder.
    """
    inside = os.path.realpath(folder) + os.sep
    paths = [folder / name for name in _listed(folder)] + list(folder.glob(_EVENT_FILES))
    for path in paths:
        parent = path.parent
        if not f"{os.path.realpath(parent)}{os.sep}".startswith(inside) or path.is_dir():
            continue
        path.unlink(missing_ok=True)
        while parent != folder and parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
            parent = parent.parent
    (folder / LIST).unlink(missing_ok=True)


def _listed(folder: Path) -> list[str]:
    try:
        return (folder / LIST).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
