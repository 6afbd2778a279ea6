"""File names inside a run folder that several packages need: the run's own files and its checkpoints."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

DIFF = "git.diff"

EXAMPLE = "example.safetensors"
"""File with two samples of the first batch of a run made in Python."""

STACKS = "stacks.txt"
"""File with the stacks of all processes of a run that hung."""

OWN_FILES = frozenset(
    [
        "config.yaml",
        "metrics.jsonl",
        "events.jsonl",
        "media.jsonl",
        "env.json",
        DIFF,
        "status.json",
        "result.json",
        ".lock",
        ".written",
        EXAMPLE,
        STACKS,
    ]
)
"""Files that a run writes into its folder, besides `samples.txt`, which a callback writes."""

CHECKPOINTS = "checkpoints"
LAST, BEST = "last", "best"
"""Names in a checkpoints folder that refer to one of the checkpoints."""

FROZEN = "frozen.safetensors"
"""File in a checkpoints folder with the parameters that the run does not train, if they are saved only once."""

TEMPORARY, REPLACED, DELETED = ".tmp-", ".old-", ".trash-"
"""Name prefixes of folders that are not checkpoints: being written, replaced, or deleted."""

_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_ASIDE = re.compile(r"(\.tmp-|\.old-|\.trash-)(.+)-[0-9a-f]{8}")


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint.

    >>> folder_name(1200)
    'step-00001200'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint with this name, or None if it is not the name of a checkpoint.

    >>> step_of("step-00001200"), step_of("last")
    (1200, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def original_name(name: str) -> str:
    """Return the final name of a checkpoint that is being written, replaced or deleted; other names are unchanged.

    >>> original_name(".old-step-00000010-1a2b3c4d")
    'step-00000010'
    """
    match = _ASIDE.fullmatch(name)
    return match[2] if match else name


def is_made(name: str) -> bool:
    """Return whether `CheckpointManager` creates such names: checkpoints, temporary ones, `last`, `best` and so on.

    >>> [is_made(name) for name in ("step-00000010", ".tmp-last-1a2b3c4d", "notes.txt")]
    [True, True, False]
    """
    name = original_name(name)
    return name in (LAST, BEST, FROZEN) or step_of(name) is not None


def output_problems(outputs: Iterable[tuple[str, str | Path]], run_dir: Path | None) -> list[tuple[str, str]]:
    """Return the conflicts between files, given pairs of a callback and a file it writes.

    Links and `..` are resolved, and case is ignored, since some file systems are case-insensitive.

    >>> output_problems([("csv_logger", "Config.YAML"), ("mine", "a.csv"), ("yours", "x/../a.csv")], Path("runs/1"))
    [('csv_logger', "Config.YAML is the run's own file"), ('yours', 'x/../a.csv is written by mine too')]
    """
    found: list[tuple[str, str]] = []
    writers: dict[str, str] = {}
    base = os.path.realpath(run_dir).casefold() if run_dir is not None else "\0"
    for writer, name in outputs:
        target = (run_dir or Path()) / name
        path = os.path.realpath(target).casefold()
        if path == base or (path.startswith(f"{base}{os.sep}") and _is_own(Path(path[len(base) + 1 :]).parts)):
            found.append((writer, f"{name or repr('')} is the run's own file"))
        elif path in writers:
            found.append((writer, f"{name} is written by {writers[path]} too"))
        elif target.exists() and not target.is_file():  # the callback would replace and destroy it
            found.append((writer, f"{name} exists and is not a regular file"))
        writers.setdefault(path, writer)
    return found


def _is_own(inside: tuple[str, ...]) -> bool:
    """Whether a lower-case path in the run folder is one that the run itself writes."""
    if inside[0] in OWN_FILES or (inside[0].startswith(".") and inside[0].endswith(".tmp")):
        return True
    if inside[0] != CHECKPOINTS or len(inside) == 1:
        return inside[0] == CHECKPOINTS
    # a subfolder may hold other files as well
    return is_made(inside[1]) or inside[1].startswith((".", "step-", "copy-of-"))
