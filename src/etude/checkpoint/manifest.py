"""The manifest of a checkpoint: size and SHA-256 of every file, and of itself, so that any changed bit is noticed."""

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from etude.core.errors import CheckpointError

MANIFEST, META, STATE, MODEL_TENSORS, STATE_TENSORS = (
    "manifest.json",
    "meta.json",
    "state.json",
    "model.safetensors",
    "state.safetensors",
)
FILES = (MODEL_TENSORS, STATE_TENSORS, STATE, META)
"""What every checkpoint consists of, besides the manifest."""

CONFIG = "run-config.yaml"
"""The config of its run, if it has one. Not `config.yaml`: a folder with that file is a run."""

FORMAT = 1
"""Version of the layout; a reader refuses a later one."""


class FileRecord(NamedTuple):
    """What a file has to be."""

    size: int
    sha256: str


def render_manifest(files: Mapping[str, FileRecord]) -> bytes:
    """Return the one and only text of a manifest for these files."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "files": {name: files[name]._asdict() for name in (*FILES, CONFIG) if name in files},
    }
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content, indent=2) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the records of a checkpoint's files; raise CheckpointError if the manifest is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}; give a folder such as checkpoints/step-00000100")
    if (folder / MANIFEST).exists() and not (folder / MANIFEST).is_file():  # reading it might never end
        raise damaged(folder, f"{MANIFEST} is not a file")
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint, or is damaged: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / MANIFEST}: {error.strerror}") from error
    try:
        content = json.loads(text)
        version = int(content["format"])
        names = [*FILES, CONFIG] if version == FORMAT and CONFIG in content["files"] else FILES
        files = {name: FileRecord(**content["files"][name]) for name in names} if version == FORMAT else {}
        if any(type(one.size) is not int or type(one.sha256) is not str for one in files.values()):
            raise TypeError
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        raise damaged(folder, f"{MANIFEST} cannot be read") from None
    if version > FORMAT:
        raise CheckpointError(f"{folder} has format {version}, this version of etude reads {FORMAT}; update etude")
    # Comparing the whole text also catches damage that JSON would read over, such as spaces or repeated keys.
    if version < FORMAT or text != render_manifest(files):
        raise damaged(folder, f"{MANIFEST} does not agree with its own checksum")
    return files


def check_size(folder: Path, name: str, expected: FileRecord) -> None:
    """Raise CheckpointError if a file is missing or does not have its size."""
    try:
        status = (folder / name).stat()
    except FileNotFoundError:
        raise damaged(folder, f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise damaged(folder, f"{name} is not a file")
    if (size := status.st_size) != expected.size:
        raise damaged(folder, f"{name} has {size} bytes, expected {expected.size}")


def check_contents(folder: Path, name: str, expected: FileRecord) -> None:
    """Read a file and raise CheckpointError if its checksum is not the recorded one."""
    try:
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
    if found != expected.sha256:
        raise damaged(folder, f"{name} has checksum {found[:16]}…, expected {expected.sha256[:16]}…")


def damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error for a checkpoint that is not what was written."""
    return CheckpointError(f"checkpoint {folder} is damaged: {what}")
