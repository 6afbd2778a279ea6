"""The names `last` and `best`: links to checkpoints, for people; what copying made of them is replaced."""

import logging
from pathlib import Path

from etude.checkpoint.durable import TEMPORARY, delete_folder, put_in_place
from etude.checkpoint.find import BEST, LAST, folder_name, step_of_copy
from etude.checkpoint.manifest import MANIFEST
from etude.checkpoint.store import is_intact
from etude.core.files import beside

_log = logging.getLogger(__name__)


def point(root: Path, name: str, target: str | None) -> None:
    """Let `root/name` stand for its sibling `target` in one atomic step, or remove it for None.

    It is a symbolic link; where the file system has none, a text file with the name of the folder (`durable.follow`).
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


def adopt_copies(root: Path) -> None:
    """Make room for `last` and `best` where they are folders, as in a run copied by something that follows links.

    A checkpoint that is nowhere else gets its own name back. One that is also there under its own name, byte for byte,
    goes. Anything else is somebody's and is only renamed.
    """
    for path in (root / LAST, root / BEST):
        if path.is_symlink() or not path.is_dir():
            continue
        step = step_of_copy(path)
        own = None if step is None else root / folder_name(step)
        if own is not None and not own.exists():
            path.rename(own)
        elif own is not None and is_intact(own) and _same(path, own):
            delete_folder(path)
        elif own is not None and is_intact(path) and not is_intact(own):
            put_in_place(path, own)
        else:
            aside = path.rename(_free_name(root, f"copy-of-{path.name}"))
            _log.warning("%s is a folder of its own, not a link to a checkpoint: renamed to %s", path, aside.name)


def _same(folder: Path, other: Path) -> bool:
    """Whether the manifests, which hold the checksums of all files, are equal."""
    return (folder / MANIFEST).read_bytes() == (other / MANIFEST).read_bytes()


def _free_name(root: Path, name: str) -> Path:
    candidates = (root / (name if count == 1 else f"{name}-{count}") for count in range(1, 1_000_000))
    return next(path for path in candidates if not path.exists() and not path.is_symlink())
