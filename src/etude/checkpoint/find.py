"""Finding checkpoints in a folder: by step, and the first one that is intact."""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from etude.checkpoint.durable import find_folders
from etude.checkpoint.store import Checkpoint, read_checkpoint, read_meta, verify_checkpoint
from etude.core.errors import CheckpointError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_STEP_FOLDER = re.compile(r"step-(\d{8,18})", re.ASCII)

LAST, BEST = "last", "best"
"""Names in a folder of checkpoints that stand for one of them."""


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint.

    >>> folder_name(1200)
    'step-00001200'
    """
    return f"step-{step:08d}"


def find_checkpoints(root: Path) -> dict[int, Path]:
    """Return the checkpoint folders in `root` by step, oldest first; they are not verified."""
    return {step: paths[0] for step, paths in find_all(root).items()}


def find_all(root: Path) -> dict[int, list[Path]]:
    """Return the folders of each step, oldest step first: `step-NNNNNNNN`, then folders `last` and `best` of that step.

    Those two are folders where a run was copied by something that follows links.
    """
    if not root.is_dir():
        return {}
    try:
        folders = find_folders(root)
    except OSError as error:
        raise CheckpointError(f"cannot list {root}: {error.strerror}") from error
    steps = {int(match[1]): [path] for name, path in folders.items() if (match := _STEP_FOLDER.fullmatch(name))}
    for name in (LAST, BEST):
        if name in folders and (step := step_of_copy(folders[name])) is not None:
            steps.setdefault(step, []).append(folders[name])
    return dict(sorted(steps.items()))


def step_of_copy(folder: Path) -> int | None:
    """Return the step of a checkpoint that has lost its own name; None if the folder is not a checkpoint."""
    try:
        step = read_meta(folder).get("step")
    except CheckpointError:
        return None
    return step if type(step) is int and _STEP_FOLDER.fullmatch(folder_name(step)) else None


def newest_intact(root: Path) -> tuple[Path, list[str]]:
    """Return the newest checkpoint that is intact, and one warning for each newer one that is not.

    Raises CheckpointError if there is none, saying what is wrong with each.
    """

    def verified(path: Path) -> Path:
        verify_checkpoint(path)
        return path

    return _first(verified, _newest_first(root), root)


def read_newest_intact(root: Path) -> Checkpoint:
    """Read the newest intact checkpoint; its `warnings` tell of newer ones that are not, and are logged."""
    return read_first_intact(_newest_first(root), root)


def read_first_intact(candidates: Iterable[Path], root: Path) -> Checkpoint:
    """Read the first of `candidates` that is intact; its `warnings` tell of those before it, and are logged."""
    checkpoint, warnings = _first(read_checkpoint, candidates, root)
    for warning in warnings:
        _log.warning(warning)
    return replace(checkpoint, warnings=tuple(warnings))


def _newest_first(root: Path) -> list[Path]:
    return [path for paths in reversed(find_all(root).values()) for path in paths]


def _first(action: Callable[[Path], T], candidates: Iterable[Path], root: Path) -> tuple[T, list[str]]:
    """Return the first result that does not fail as damaged, and what was wrong with those before."""
    problems: list[str] = []
    for path in candidates:
        try:
            return action(path), [f"passed over: {problem}" for problem in problems]
        except CheckpointError as error:
            problems.append(str(error))
    if not problems:
        raise CheckpointError(f"there is no checkpoint in {root}; train first, or give another folder")
    short = "; ".join(problem.replace(f"checkpoint {root}/", "") for problem in problems)
    raise CheckpointError(f"no checkpoint in {root} is intact: {short}; bring back a copy, or train anew")
