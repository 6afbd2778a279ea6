"""Writing, verifying and reading one checkpoint folder.

Its manifest has the size and SHA-256 of every file, and of itself, so that any changed bit is detected.
"""

import errno
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etude.checkpoint.durable import HashedFile, follow, new_folder
from etude.checkpoint.format import pack, read_tensors, safetensors_pieces, unpack
from etude.checkpoint.frozen import with_frozen
from etude.checkpoint.trust import errors_of
from etude.core.errors import CheckpointError
from etude.lazy import package_version

MANIFEST, META, STATE, MODEL_TENSORS, STATE_TENSORS = (
    "manifest.json",
    "meta.json",
    "state.json",
    "model.safetensors",
    "state.safetensors",
)
FILES = (MODEL_TENSORS, STATE_TENSORS, STATE, META)
"""Files of every checkpoint, besides the manifest."""

CONFIG = "run-config.yaml"
"""The config of its run, if any. Not `config.yaml`: a folder with that file is a run folder."""

FORMAT = 1
"""Version of the layout; a later one is refused."""


class FileRecord(NamedTuple):
    """The recorded size and checksum of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint folder, in CPU memory."""

    path: Path
    model_state: dict[str, Any]
    """The module's state by name; tied weights are one tensor under each of their names."""
    state: Any
    """All other state, as passed to `write_checkpoint`."""
    meta: dict[str, Any]
    """The contents of meta.json, for people."""
    config: str = ""
    """The complete config of the run as YAML; empty if it was saved without one."""
    warnings: tuple[str, ...] = ()
    """One line for every newer or better checkpoint that was skipped because it is damaged."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics measured at that step; raises CheckpointError if they are not numbers."""
        with errors_of(self.path, f"metrics in {META}"):
            return {name: float(value) for name, value in self.meta.get("metrics", {}).items()}


def write_checkpoint(
    folder: Path, model_state: Mapping[str, Any], state: Any, meta: Mapping[str, Any], config: str = ""
) -> None:
    """Write a checkpoint; it exists under its name only once it is complete and on disk.

    `meta` is for people: step, epoch, metrics; versions, time and shapes are added. `config` is the text of the run's
    config file: with it, a checkpoint that was moved elsewhere is self-describing. A checkpoint of the same name is
    replaced. Raises CheckpointError if `state` holds an unsupported object or if writing fails; earlier checkpoints
    are unchanged either way.
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
            # Synced after the last write, so that the file system can commit them together.
            for file in files.values():
                file.sync()
    except OSError as error:
        raise cannot_save(folder, error) from error


def verify_checkpoint(folder: Path) -> None:
    """Raise CheckpointError with the file and the difference, unless every byte is as it was written."""
    folder = follow(folder)
    for name, record in _read_manifest(folder).items():
        _check_file(folder, name, record)


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
        raise _damaged(folder, f"{STATE} has no model or no state")
    parts = {}
    for part, name in (("model", MODEL_TENSORS), ("state", STATE_TENSORS)):
        try:
            parts[part] = unpack(read_tensors(folder / name), structure[part])
        except CheckpointError as error:  # the checksums match, but the contents are not ours
            raise _damaged(folder, f"{part} in {STATE}: {error}") from error
    if not isinstance(parts["model"], dict) or not all(isinstance(name, str) for name in parts["model"]):
        raise _damaged(folder, f"model in {STATE} is not tensors by name")
    parts["model"] = with_frozen(parts["model"], folder.parent)
    config = _read(folder, CONFIG).decode(errors="replace") if CONFIG in _read_manifest(folder) else ""
    return Checkpoint(folder, parts["model"], parts["state"], _read_json(folder, META), config)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read only meta.json, verified; tensors are not read."""
    folder = follow(folder)
    _check_file(folder, META, _read_manifest(folder)[META])
    return _read_json(folder, META)


# --- the manifest


def render_manifest(files: Mapping[str, FileRecord]) -> bytes:
    """Return the canonical text of a manifest for these files."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "files": {name: files[name]._asdict() for name in (*FILES, CONFIG) if name in files},
    }
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content, indent=2) + "\n").encode()


def _read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the records of a checkpoint's files; raise CheckpointError if the manifest is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}; choose a folder such as checkpoints/step-00000100")
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} is not a checkpoint, or is damaged: it has no {MANIFEST}")
    content = _read_json(folder, MANIFEST)
    version = content.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{folder} has format {version}, this version of etude reads {FORMAT}; update etude")
    try:
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        # Comparing the whole text also detects damage that a JSON parser ignores, such as spaces or repeated keys.
        is_intact = _read(folder, MANIFEST) == render_manifest(files) and files.keys() >= {*FILES}
    except (TypeError, LookupError, AttributeError):
        is_intact = False
    if not is_intact:
        raise _damaged(folder, f"{MANIFEST} does not agree with its own checksum")
    return files


def _check_file(folder: Path, name: str, expected: FileRecord) -> None:
    """Raise CheckpointError if a file is missing, or if its size or checksum differs from the recorded one."""
    with _reading(folder, name), (folder / name).open("rb") as file:
        if (size := (folder / name).stat().st_size) != expected.size:
            raise _damaged(folder, f"{name} has {size} bytes, expected {expected.size}")
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected.sha256:
        raise _damaged(folder, f"{name} has checksum {found[:16]}…, expected {expected.sha256!s:.16}…")


def _damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(f"checkpoint {folder} is damaged: {what}")


# --- files


def cannot_save(folder: Path, error: OSError) -> CheckpointError:
    """Return the error for a failed write, with a suitable remedy."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "free some space or keep fewer checkpoints"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR:
            remedy = "choose a folder that can be written"
        case _:
            remedy = "check the disk"
    what = error.strerror or str(error)
    return CheckpointError(f"cannot save {folder}: {what}; {remedy} (earlier checkpoints are unchanged)")


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
        "etude": package_version(),
        "torch": torch.__version__,
        "python": python_version(),
        "parameters": shapes,
    }
    return (json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """Return `value` as readable standard JSON; objects without a JSON form become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(_read(folder, name))
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{name} is not JSON ({error!s:.100})") from None
    if not isinstance(content, dict):
        raise _damaged(folder, f"{name} is not a JSON object")
    return content


def _read(folder: Path, name: str) -> bytes:
    with _reading(folder, name):
        return (folder / name).read_bytes()


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    """Return the bytes of a file, or raise an error that names it. It never blocks on a pipe."""
    try:
        if (folder / name).exists() and not (folder / name).is_file():
            raise _damaged(folder, f"{name} is not a file")
        yield
    except FileNotFoundError:
        raise _damaged(folder, f"{name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
