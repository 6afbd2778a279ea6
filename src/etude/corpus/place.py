"""The output folder: what is in it, whether it is what was asked for, and small files written as a whole."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from etude.core.errors import DataError
from etude.core.files import FolderLock, LockHeld, write_text
from etude.corpus.report import FACTS, CorpusReport

INPUTS = ".inputs.json"
"""Which files the corpus was made of, as this machine sees them; lets a second run say at once that all is done."""


def compare_options(report: CorpusReport, facts: dict[str, Any]) -> None:
    """Raise DataError if a corpus was made with other options."""
    other = [key for key in {**report.options, **facts} if report.options.get(key) != facts.get(key)]
    if other:
        was = ", ".join(f"{key} {report.options.get(key, 'unset')!r}" for key in other[:3])
        now = ", ".join(f"{facts.get(key, 'unset')!r}" for key in other[:3])
        raise DataError(
            f"{report.folder} holds a corpus made with {was}, not {now}; "
            f"add --overwrite to replace it, or give another --out"
        )


def check_complete(report: CorpusReport) -> None:
    """Raise DataError if a file of a finished corpus is gone."""
    for name in ("tokenizer.json", *(f"{split}.bin" for split in report.splits)):
        if not (report.folder / name).is_file():
            raise DataError(f"{report.folder} has a {FACTS} but no {name}; make it again with --overwrite")


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return what is known of the files that a corpus was made of; nothing if it came from elsewhere."""
    try:
        known = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        known if isinstance(known, dict) and {"stamp", "inputs", "skipped", "num_duplicates"} <= known.keys() else {}
    )


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is there as a whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def folder_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder. If another process holds it: wait until it ends, or raise DataError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(FolderLock(folder / ".lock", wait=wait, keep=False))
        except LockHeld as held:
            raise DataError(
                f"{folder} is being written by process {held.holder}; wait until it ends, or give another --out"
            ) from None
        yield
