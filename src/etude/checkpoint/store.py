"""Writing, verifying and reading one checkpoint folder.

Its manifest has the size and SHA-256 of every file, and of itself, so that any changed bit is detected.
"""

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from etude.checkpoint.contents import (
    CONFIG,
    FORMAT,
    MANIFEST,
    META,
    PARTS,
    SHARDED,
    STATE,
    Contents,
    num_shards,
    tensor_file,
)
from etude.checkpoint.durable import HashedFile, follow, new_folder
from etude.checkpoint.format import read_tensors, unpack
from etude.checkpoint.frozen import with_frozen
from etude.checkpoint.saved_tensor import saved_tensors, whole
from etude.checkpoint.trust import errors_of
from etude.core.errors import CheckpointError
from etude.distributed import World


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


# --- writing


def write_checkpoint(
    folder: Path,
    model_state: Mapping[str, Any],
    state: Any,
    meta: Mapping[str, Any],
    config: str = "",
    world: World | None = None,
) -> None:
    """Write a checkpoint; it exists under its name only once it is complete and on disk.

    `meta` is for people: step, epoch, metrics; versions, time and shapes are added. `config` is the text of the run's
    config file: with it, a checkpoint that was moved elsewhere is self-describing. A checkpoint of the same name is
    replaced. With several ranks all of them call this; each writes its blocks of the tensors that are divided among
    them (DTensor), rank 0 writes everything else. Raises CheckpointError, on all ranks, if `state` holds an
    unsupported object or if writing fails; earlier checkpoints are unchanged either way.
    """
    world = World() if world is None else world
    contents = Contents.of(model_state, state, meta, config, world)
    world.attempt(lambda: write_contents(folder, contents, world), here=world.is_main or contents.is_sharded)


def write_contents(folder: Path, contents: Contents, world: World) -> None:
    """Write what was prepared: called by rank 0, or by all ranks together if the contents are sharded."""
    if contents.is_sharded:
        _write_together(folder, contents, world)
        return
    with _saving(folder), new_folder(folder) as temporary, _NewFiles(temporary) as files:
        files.write_tensors(contents)
        files.write_texts(contents.texts)


def _write_together(folder: Path, contents: Contents, world: World) -> None:
    """Let every rank write its files, then rank 0 the manifest of all.

    The temporary folder of rank 0 is removed only when no other rank writes into it any more.
    """
    with ExitStack() as stack:

        def begin() -> Path:
            with _saving(folder):
                return stack.enter_context(new_folder(folder))

        def write() -> dict[str, FileRecord]:
            with _saving(folder), _NewFiles(temporary) as files:
                files.write_tensors(contents)
            return files.records

        def finish() -> None:
            with _saving(folder):
                with _NewFiles(temporary) as files:
                    for text in written:
                        files.records |= {name: FileRecord(*record) for name, record in json.loads(text).items()}
                    files.write_texts(contents.texts)
                stack.close()  # renames the folder

        made = world.attempt(begin, here=world.is_main)
        temporary = folder.with_name(world.share_text("" if made is None else made.name))
        written = world.gather_text(json.dumps(world.attempt(write)))
        world.attempt(finish, here=world.is_main)


class _NewFiles:
    """Files being written into a folder; they are synced after the last write, so that they are committed together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[HashedFile] = []
        self.records: dict[str, FileRecord] = {}

    def __enter__(self) -> "_NewFiles":
        return self

    def write_tensors(self, contents: Contents) -> None:
        """Write the files of tensors."""
        for name in contents.tensors:
            self._write(name, contents.pieces(name))

    def write_texts(self, texts: Mapping[str, bytes]) -> None:
        """Write the small files, and a manifest of everything."""
        for name, text in texts.items():
            self._write(name, [text])
        self._write(MANIFEST, [render_manifest(self.records)])

    def _write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        file = HashedFile(self._folder / name)
        self._files.append(file)
        for piece in pieces:
            file.write(piece)
        self.records[name] = FileRecord(file.size, file.sha256)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for file in self._files if kind is None else ():
                file.sync()
        finally:
            for file in self._files:
                file.close()


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_save(folder, error) from error


def cannot_save(folder: Path, error: OSError) -> CheckpointError:
    """Return the error for a failed write, with a suitable remedy."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "free some space or keep fewer checkpoints"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR:
            remedy = "choose a folder that can be written"
        case errno.ENOENT:
            remedy = "check the disk; with several machines choose a folder that all of them share"
        case _:
            remedy = "check the disk"
    what = error.strerror or str(error)
    return CheckpointError(f"cannot save {folder}: {what}; {remedy} (earlier checkpoints are unchanged)")


# --- reading


def verify_checkpoint(folder: Path, world: World | None = None) -> None:
    """Raise CheckpointError with the file and the difference, unless every byte is as it was written.

    The ranks of a world share the files among them; all raise the same error.
    """
    folder, world = follow(folder), World() if world is None else world

    def check() -> None:
        for name, record in list(_read_manifest(folder).items())[world.rank :: world.size]:
            _check_file(folder, name, record)

    world.attempt(check)


def is_intact(folder: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written."""
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def read_checkpoint(folder: Path | str, *, lazy: bool = False, world: World | None = None) -> Checkpoint:
    """Verify a checkpoint and read it; nothing in it can run code. Raises CheckpointError if it is damaged.

    With `lazy`, tensors are `SavedTensor`s, whose values are read when they are needed. With several ranks all of them
    call this, and all raise the same error.
    """
    found, world = follow(Path(folder)), World() if world is None else world
    verify_checkpoint(found, world)
    checkpoint = world.attempt(lambda: _read_verified(found, lazy=lazy))
    assert checkpoint is not None
    return checkpoint


def _read_verified(folder: Path, *, lazy: bool) -> Checkpoint:
    structure = _read_json(folder, STATE)
    if not {*PARTS} <= structure.keys():
        raise _damaged(folder, f"{STATE} has no model or no state")
    files, parts = _read_manifest(folder), {}
    size = num_shards(files)
    for part in PARTS:
        paths = [folder / tensor_file(part, rank, size) for rank in range(size)]
        try:
            tensors = saved_tensors(paths) if lazy or size > 1 else read_tensors(paths[0])
            tree = unpack(tensors if lazy else {name: whole(one) for name, one in tensors.items()}, structure[part])
        except CheckpointError as error:  # the checksums match, but the contents are not ours
            raise _damaged(folder, f"{part} in {STATE}: {error}") from error
        parts[part] = tree
    if not isinstance(parts["model"], dict) or not all(isinstance(name, str) for name in parts["model"]):
        raise _damaged(folder, f"model in {STATE} is not tensors by name")
    parts["model"] = with_frozen(parts["model"], folder.parent, lazy=lazy)
    config = _read(folder, CONFIG).decode(errors="replace") if CONFIG in files else ""
    return Checkpoint(folder, parts["model"], parts["state"], _read_json(folder, META), config)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read only meta.json, verified; tensors are not read."""
    folder = follow(folder)
    _check_file(folder, META, _read_manifest(folder)[META])
    return _read_json(folder, META)


# --- the manifest


def render_manifest(files: Mapping[str, FileRecord]) -> bytes:
    """Return the canonical text of a manifest for these files."""
    size = num_shards(files)
    content: dict[str, Any] = {
        "format": FORMAT if size == 1 else SHARDED,
        "files": {name: files[name]._asdict() for name in (*_needed(size), CONFIG) if name in files},
    }
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content, indent=2) + "\n").encode()


def _needed(size: int) -> list[str]:
    """Return the files of every checkpoint that this number of ranks wrote, besides the manifest, in their order."""
    return [*(tensor_file(part, rank, size) for part in PARTS for rank in range(size)), STATE, META]


def _read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the records of a checkpoint's files; raise CheckpointError if the manifest is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}; choose a folder such as checkpoints/step-00000100")
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{folder} is not a checkpoint, or is damaged: it has no {MANIFEST}")
    content = _read_json(folder, MANIFEST)
    version = content.get("format")
    if isinstance(version, int) and version > SHARDED:
        raise CheckpointError(f"{folder} has format {version}, this version of etude reads {SHARDED}; update etude")
    try:
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        # Comparing the whole text also detects damage that a JSON parser ignores, such as spaces or repeated keys.
        is_intact = files.keys() >= {*_needed(num_shards(files))} and _read(folder, MANIFEST) == render_manifest(
            files
        )
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
