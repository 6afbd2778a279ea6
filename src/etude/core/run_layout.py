"""Names of a run's files that several rooms know: its own files, and what lies in its folder of checkpoints."""

import re

OWN_FILES = frozenset(
    ["config.yaml", "metrics.jsonl", "metrics.csv", "events.jsonl", "env.json", "result.json", ".lock"]
)
"""What a run writes into its folder, besides `samples.txt`, which a callback writes."""

CHECKPOINTS = "checkpoints"
LAST, BEST = "last", "best"
"""Names in a folder of checkpoints that stand for one of them."""

TEMPORARY, REPLACED, DELETED = ".tmp-", ".old-", ".trash-"
"""Name prefixes of folders that are not checkpoints: being written, replaced by a newer one, being deleted."""

_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_ASIDE = re.compile(r"(\.tmp-|\.old-|\.trash-)(.+)-[0-9a-f]{8}")


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint.

    >>> folder_name(1200)
    'step-00001200'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that has this name, None if a checkpoint is not called so.

    >>> step_of("step-00001200"), step_of("last")
    (1200, None)
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def original_name(name: str) -> str:
    """Return what a checkpoint is called that is being written, replaced or deleted; any other name as it is.

    >>> original_name(".old-step-00000010-1a2b3c4d")
    'step-00000010'
    """
    match = _ASIDE.fullmatch(name)
    return match[2] if match else name


def is_made(name: str) -> bool:
    """Return whether `CheckpointManager` gives such names: checkpoints, those on their way, and `last` and `best`.

    >>> [is_made(name) for name in ("step-00000010", ".tmp-last-1a2b3c4d", "notes.txt")]
    [True, True, False]
    """
    name = original_name(name)
    return name in (LAST, BEST) or step_of(name) is not None
