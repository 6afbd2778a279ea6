"""A folder of checkpoints: finding intact ones, deciding which to keep, and the links `last` and `best`."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from etude.checkpoint.contents import MANIFEST
from etude.checkpoint.durable import delete_folder, find_folders
from etude.checkpoint.store import Checkpoint, is_intact, read_checkpoint, verify_checkpoint
from etude.core.errors import CheckpointError
from etude.core.files import beside
from etude.core.monitor import Mode
from etude.core.run_layout import BEST, LAST, TEMPORARY, step_of

T = TypeVar("T")
_log = logging.getLogger(__name__)


# --- finding them


def find_checkpoints(root: Path) -> dict[int, Path]:
    """Return the checkpoint folders in `root` by step, oldest first; they are not verified."""
    if not root.is_dir():
        return {}
    try:
        folders = find_folders(root)
    except OSError as error:
        raise CheckpointError(f"cannot list {root}: {error.strerror}") from error
    return dict(sorted((step, path) for name, path in folders.items() if (step := step_of(name)) is not None))


def newest_intact(root: Path) -> tuple[Path, list[str]]:
    """Return the newest checkpoint that is intact, and one warning for each newer one that is not.

    Raises CheckpointError if there is none, with the problem of each checkpoint.
    """

    def verified(path: Path) -> Path:
        verify_checkpoint(path)
        return path

    return _first(verified, _newest_first(root), root)


def read_newest_intact(root: Path) -> Checkpoint:
    """Read the newest intact checkpoint; `warnings` lists newer damaged ones, which are also logged."""
    return read_first_intact(_newest_first(root), root)


def read_first_intact(candidates: Iterable[Path], root: Path) -> Checkpoint:
    """Read the first intact one of `candidates`; `warnings` lists the damaged ones before it, also logged."""
    checkpoint, warnings = _first(read_checkpoint, candidates, root)
    for warning in warnings:
        _log.warning(warning)
    return replace(checkpoint, warnings=tuple(warnings))


def _newest_first(root: Path) -> list[Path]:
    return list(reversed(find_checkpoints(root).values()))


def _first(action: Callable[[Path], T], candidates: Iterable[Path], root: Path) -> tuple[T, list[str]]:
    """Return the first result that is not damaged, and the problems of those before it."""
    problems: list[str] = []
    for path in candidates:
        try:
            return action(path), [f"passed over: {problem}" for problem in problems]
        except CheckpointError as error:
            problems.append(str(error))
    if not problems:
        raise CheckpointError(f"there is no checkpoint in {root}; train first, or choose another folder")
    short = "; ".join(problem.replace(f"checkpoint {root}/", "") for problem in problems)
    raise CheckpointError(f"no checkpoint in {root} is intact: {short}; restore a copy, or train again")


# --- which to keep


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint and its monitored metric.

    Phases of a run may train different things, so their losses are comparable only within a phase: any checkpoint of
    a later phase ranks before all of an earlier one.
    """

    step: int
    value: float | None = None
    """The monitored metric at that step; None if it was not measured."""
    phase: float = 0.0
    """The phase of the run in which it was measured."""


def best_first(entries: Iterable[Entry], mode: Mode) -> list[Entry]:
    """Return the entries with a value: the latest phase first, within a phase the best, of equal ones the earlier.

    NaN does not count as a value.

    >>> [entry.step for entry in best_first([Entry(1, 0.5), Entry(2, 0.2), Entry(3), Entry(4, float("nan"))], "min")]
    [2, 1]
    >>> [entry.step for entry in best_first([Entry(1, 0.2, phase=1), Entry(2, 0.9, phase=2)], "min")]
    [2, 1]
    """
    sign = 1.0 if mode == "min" else -1.0
    measured = [
        ((-e.phase, sign * e.value, e.step), e) for e in entries if e.value is not None and not math.isnan(e.value)
    ]
    return [entry for _, entry in sorted(measured, key=lambda item: item[0])]


def to_delete(entries: Sequence[Entry], keep_best: int, mode: Mode, protect: Set[int] = frozenset()) -> list[int]:
    """Return the steps to delete, oldest first: all but the newest, the best `keep_best` and the protected ones.

    If fewer than `keep_best` have a value, the newest others are kept instead, so that a run that never validates
    also has several checkpoints.

    >>> to_delete([Entry(1, 0.5), Entry(2, 0.2), Entry(3, 0.4), Entry(4, 0.6)], keep_best=2, mode="min")
    [1]
    >>> to_delete([Entry(1), Entry(2), Entry(3)], keep_best=0, mode="min")
    [1, 2]
    """
    newest_first = sorted((entry.step for entry in entries), reverse=True)
    ranked = [entry.step for entry in best_first(entries, mode)]
    unmeasured = [step for step in newest_first[1:] if step not in ranked]
    keep = {*newest_first[:1], *(ranked + unmeasured)[:keep_best], *protect}
    return [step for step in reversed(newest_first) if step not in keep]


# --- last and best


def point(root: Path, name: str, target: str | None) -> None:
    """Atomically make `root/name` refer to its sibling `target`, or remove it if that is None.

    It is a symbolic link, or on file systems without links a text file with the folder's name (`durable.follow`).
    """
    pointer = root / name
    if target is None:
        pointer.unlink(missing_ok=True)
        return
    if pointer.is_symlink() and str(pointer.readlink()) == target:
        return
    temporary = beside(pointer, TEMPORARY)
    try:
        try:
            temporary.symlink_to(target, target_is_directory=True)
        except OSError:
            temporary.write_text(f"{target}\n", encoding="utf-8")
        temporary.replace(pointer)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_copies(root: Path) -> None:
    """Remove or rename `last` and `best` if they are folders, as in a run copied by a tool that follows links.

    A copy of an existing intact checkpoint is removed. Anything else may be user data and is only renamed.
    """
    for path in (root / LAST, root / BEST):
        if path.is_symlink() or not path.is_dir():
            continue
        own = [other for other in find_checkpoints(root).values() if _manifest(other) == _manifest(path) is not None]
        if own and is_intact(own[0]):
            delete_folder(path)
        else:
            aside = path.rename(beside(path, "copy-of-"))
            _log.warning("%s is a folder, not a link to a checkpoint: renamed to %s", path, aside.name)


def _manifest(folder: Path) -> bytes | None:
    """Return the manifest, which holds the checksums of all files."""
    return (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else None
