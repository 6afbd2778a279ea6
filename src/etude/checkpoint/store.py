"""Writing, verifying and reading one checkpoint folder."""

import errno
import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from torch import Tensor

from etude.checkpoint.durable import HashedFile, follow, new_folder
from etude.checkpoint.format import pack, unpack
from etude.checkpoint.manifest import (
    CONFIG,
    FILES,
    FORMAT,
    MANIFEST,
    META,
    MODEL_TENSORS,
    STATE,
    STATE_TENSORS,
    FileRecord,
    check_contents,
    check_size,
    damaged,
    read_manifest,
    render_manifest,
)
from etude.checkpoint.tensorfile import read_tensors, safetensors_pieces
from etude.checkpoint.trust import explained
from etude.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint folder holds, in memory on the CPU."""

    path: Path
    model_state: dict[str, Any]
    """The module's state by name; tied weights are one tensor under each of their names."""
    state: Any
    """Everything else, as it was given."""
    meta: dict[str, Any]
    """The contents of meta.json, for people."""
    config: str = ""
    """The config of the run as YAML, all of it; empty if it was saved without one."""
    warnings: tuple[str, ...] = ()
    """One line for every newer or better checkpoint that was damaged and passed over."""

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that were measured at that step; raises CheckpointError if they are not numbers."""
        with explained(self.path, f"metrics in {META}"):
            return {name: float(value) for name, value in self.meta.get("metrics", {}).items()}


def write_checkpoint(
    folder: Path, model_state: Mapping[str, Any], state: Any, meta: Mapping[str, Any], config: str = ""
) -> None:
    """Write a checkpoint; when this returns it is on the disk, and until then there is nothing under its name.

    `meta` is for people: step, epoch, metrics; versions, time and shapes are added. `config` is the text of the run's
    config file: with it, a checkpoint that was moved elsewhere says what it is.
    A checkpoint of the same name is replaced. Raises CheckpointError if `state` holds anything that is not data
    or if the disk refuses; earlier checkpoints are untouched either way.
    """
    model_tensors, model_structure = pack(dict(model_state), "model")
    state_tensors, state_structure = pack(state, "state")
    structure = {"format": FORMAT, "model": model_structure, "state": state_structure}
    try:
        with new_folder(folder) as temporary, ExitStack() as stack:
            files = {}
            names = [*FILES, CONFIG] if config else FILES
            for name in (*names, MANIFEST):
                files[name] = HashedFile(temporary / name)
                stack.callback(files[name].close)
            for name, tensors in ((MODEL_TENSORS, model_tensors), (STATE_TENSORS, state_tensors)):
                for piece in safetensors_pieces(tensors):
                    files[name].write(piece)
            files[STATE].write(json.dumps(structure, separators=(",", ":"), allow_nan=False).encode())
            files[META].write(_render_meta(meta, model_state))
            if config:
                files[CONFIG].write(config.encode("utf-8", "backslashreplace"))
            records = {name: FileRecord(files[name].size, files[name].sha256) for name in names}
            files[MANIFEST].write(render_manifest(records))
            # Synced only after the last write, so that the file system can commit them together.
            for file in files.values():
                file.sync()
    except OSError as error:
        raise cannot_save(folder, error) from error


def verify_checkpoint(folder: Path) -> None:
    """Raise CheckpointError, saying which file and how, unless every byte is as it was written."""
    folder = follow(folder)
    records = read_manifest(folder)
    for name in records:
        check_size(folder, name, records[name])
    for name in records:
        check_contents(folder, name, records[name])


def is_intact(folder: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written."""
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read it; nothing in it can run code. Raises CheckpointError if it is damaged."""
    folder = follow(folder)
    verify_checkpoint(folder)
    structure = _read_json(folder, STATE)
    if not {"model", "state"} <= structure.keys():
        raise damaged(folder, f"{STATE} has no model or no state")
    parts = {}
    for part, name in (("model", MODEL_TENSORS), ("state", STATE_TENSORS)):
        try:
            parts[part] = unpack(read_tensors(folder / name), structure[part])
        except CheckpointError as error:  # checksums right, contents not ours
            raise damaged(folder, f"{part} in {STATE}: {error}") from error
    if not isinstance(parts["model"], dict) or not all(isinstance(name, str) for name in parts["model"]):
        raise damaged(folder, f"model in {STATE} is not tensors by name")
    config = _read_text(folder, CONFIG) if CONFIG in read_manifest(folder) else ""
    return Checkpoint(folder, parts["model"], parts["state"], _read_json(folder, META), config)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json alone, verified; the tensors are not looked at."""
    folder = follow(folder)
    record = read_manifest(folder)[META]
    check_size(folder, META, record)
    check_contents(folder, META, record)
    return _read_json(folder, META)


def cannot_save(folder: Path, error: OSError) -> CheckpointError:
    """Return the error for a disk that refuses, with the remedy that fits."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "free some space or keep fewer checkpoints"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR:
            remedy = "choose a folder that can be written"
        case _:
            remedy = "check the disk"
    what = error.strerror or str(error)
    return CheckpointError(f"cannot save {folder}: {what}; {remedy} (earlier checkpoints are untouched)")


def _render_meta(meta: Mapping[str, Any], model_state: Mapping[str, Any]) -> bytes:
    shapes = {
        name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in model_state.items()
        if isinstance(value, Tensor)
    }
    content = {
        "format": FORMAT,
        **meta,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "etude": _etude_version(),
        "torch": torch.__version__,
        "python": python_version(),
        "parameters": shapes,
    }
    return (json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Return `value` as standard JSON that a person can read; what has no such form is given in words."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(
            (folder / name).read_bytes(), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant
        )
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(folder, f"{name} is not JSON ({error!s:.100})") from None
    if not isinstance(content, dict):
        raise damaged(folder, f"{name} is not a JSON object")
    return content


def _read_text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / name}: {error}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is there twice")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


@cache
def _etude_version() -> str:
    try:
        return metadata.version("etude")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
