"""Files that callbacks write: none may be one of the run's own files, that of another callback, or a device."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from etude.core.run_layout import CHECKPOINTS, OWN_FILES, is_made


def output_problems(outputs: Iterable[tuple[str, str | Path]], run_dir: Path | None) -> list[tuple[str, str]]:
    """Return who would write over what, for pairs of a callback and a file it writes.

    Links and `..` are followed, and letter case is not looked at: on some file systems it makes no difference.

    >>> output_problems([("csv_logger", "Config.YAML"), ("mine", "a.csv"), ("yours", "x/../a.csv")], Path("runs/1"))
    [('csv_logger', "Config.YAML is the run's own file"), ('yours', 'x/../a.csv is written by mine too')]
    """
    base = _parts(run_dir) if run_dir is not None else None
    found: list[tuple[str, str]] = []
    writers: dict[tuple[str, ...], str] = {}
    for writer, name in outputs:
        target = (run_dir or Path()) / name
        path = _parts(target)
        inside = path[len(base) :] if base is not None and path[: len(base)] == base else None
        if inside is not None and _is_own(inside):
            found.append((writer, f"{name or repr('')} is the run's own file"))
        elif path in writers:
            found.append((writer, f"{name} is written by {writers[path]} too"))
        elif _is_special(target):
            found.append((writer, f"{name} is there and is no regular file"))
        writers.setdefault(path, writer)
    return found


def _is_own(inside: tuple[str, ...]) -> bool:
    """Whether a path in the run folder, in small letters, is one that the run itself writes."""
    if not inside or inside[0] in OWN_FILES or (inside[0].startswith(".") and inside[0].endswith(".tmp")):
        return True
    if inside[0] != CHECKPOINTS or len(inside) == 1:
        return inside[0] == CHECKPOINTS
    return is_made(inside[1]) or inside[1].startswith((".", "step-", "copy-of-"))  # other files may lie beside them


def _is_special(path: Path) -> bool:
    """Whether there is a folder, a device or a pipe of that name: replacing it would destroy it."""
    try:
        return path.exists() and not path.is_file()
    except (OSError, ValueError):  # no file can have such a name; opening it says so
        return False


def _parts(path: Path) -> tuple[str, ...]:
    with suppress(ValueError):  # no file can have such a name; opening it says so
        path = Path(os.path.realpath(path))
    return tuple(part.casefold() for part in path.parts)
