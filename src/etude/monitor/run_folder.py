"""The run folder: the files of a run, their paths, and the right to write them.

config.yaml      the complete resolved config; a folder with this file holds a run
metrics.jsonl    one record per log point, validation and epoch
events.jsonl     what happened: start, phases, checkpoints, warnings, errors, end
media.jsonl      texts, matrices and pictures by step, if there are any
status.json      a heartbeat while the run is alive, then how it ended
env.json         versions, device, commit, command line
git.diff         changes of tracked files that were not committed when the run began, if there were any
checkpoints/     where `etude resume` continues from
result.json      the outcome, written at the end
samples.txt      texts sampled from a language model at the end, if configured
stacks.txt       where each process was, if several of them hung
example.safetensors  two samples of the first batch of a run made in Python, for `etude export`
metrics/         files of metrics, such as a confusion matrix, if there are any
.written         the names of such files
sinks/           a small file for every tool to which the run is passed on
.lock            the id of the process that writes here
.launch          ids of the launchers whose processes have run here, if they may restart them
"""

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from etude.core import RunFolderError
from etude.core.files import FolderLock, LockHeld, replacing, write_text
from etude.core.run_layout import CHECKPOINTS, DIFF, EXAMPLE, STACKS
from etude.monitor.checkpoint_folder import checkpoint_folder, claim, holds_checkpoints, made_in, setting_in
from etude.monitor.environment import collect_environment, uncommitted
from etude.monitor.jsonl import decode, plain, read_jsonl
from etude.monitor.written import note_written, remove_written

SAMPLES = "samples.txt"
SINKS = "sinks"
"""Folder with a small file for every tool to which the run is passed on."""
FINISHED = "finished"
"""The `status` in result.json of a run that reached its end."""

_MADE_IN_PYTHON = "# Made in Python: model and data are code, so the run cannot be rebuilt from this file alone."


class RunFolder:
    """Paths and files of one run. The constructor does not touch the disk: use `create` or `open`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.media_path = self.path / "media.jsonl"
        self.status_path = self.path / "status.json"
        self.environment_path = self.path / "env.json"
        self.diff_path = self.path / DIFF
        self.result_path = self.path / "result.json"
        self.samples_path = self.path / SAMPLES
        self.checkpoints_path = self.path / CHECKPOINTS
        self.lock_path = self.path / ".lock"
        self.launch_path = self.path / ".launch"
        self.is_held = False
        """Whether this object holds the lock."""

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False, checkpoint_dir: str | None = None) -> "RunFolder":
        """Create a folder for a new run; `overwrite` removes an existing run, checkpoints included.

        Raises RunFolderError if it cannot be written, holds a run, or is in use.
        """
        folder = cls.ensure(path, checkpoint_dir)
        with folder.lock():
            folder.claim_checkpoints(new=True)
            if overwrite:
                if folder.holds_run:  # the removed run may have its checkpoints elsewhere
                    cls.open(path).remove_run()
                folder.remove_run()
            elif folder.is_rebuildable or folder.is_used:
                way = f"use `etude resume {quote(str(folder.path))}` or" if folder.is_rebuildable else "use"
                raise RunFolderError(
                    f"{folder.path} already holds a run; {way} another --run-dir (--overwrite removes the run)"
                )
        return folder

    @classmethod
    def ensure(cls, path: str | Path, checkpoint_dir: str | None = None) -> "RunFolder":
        """Create a folder if there is none, whatever it holds; raise RunFolderError if it cannot be written.

        For a `Trainer` made in Python, which checks `is_used` before it writes; every process of a run may call it.
        """
        folder = cls(path)
        folder.place_checkpoints(checkpoint_dir)
        try:
            str(path).encode()  # checkpoint file names must be valid UTF-8
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock_path.touch()  # check that files can be written here
        except (OSError, ValueError) as error:
            why = "its name is not UTF-8" if isinstance(error, UnicodeError) else getattr(error, "strerror", error)
            shown = str(folder.path).encode(errors="backslashreplace").decode()
            raise RunFolderError(f"cannot write run folder {shown}: {why}; choose a writable --run-dir") from error
        try:
            folder.checkpoints_path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "--run-dir" if checkpoint_dir is None else "training.checkpoint_dir"
            raise RunFolderError(
                f"cannot make the folder {folder.checkpoints_path}: {error.strerror or error}; choose another {remedy}"
            ) from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open the folder of an earlier run; raises RunFolderError if there is none."""
        folder = cls(path)
        if folder.holds_run:
            folder.place_checkpoints(setting_in(folder.config_path))
            return folder
        if not _exists(folder.path):
            raise RunFolderError(f"there is no run folder {folder.path}; choose a folder made by `etude train`")
        hint = "; choose a folder made by `etude train`"
        if inside := newest_run(folder.path):
            hint = f"; did you mean {inside.path}?"
        raise RunFolderError(f"{folder.path} is not a run folder: it has no config.yaml{hint}")

    def place_checkpoints(self, setting: str | None) -> None:
        """Set `checkpoints_path` from `training.checkpoint_dir`; raise ConfigError if it is invalid."""
        self.checkpoints_path = checkpoint_folder(self.path, setting)

    def claim_checkpoints(self, *, new: bool) -> None:
        """Record that the checkpoints belong to this run; raise RunFolderError if another run keeps its own there.

        With `new` the run is just starting, so existing checkpoints are not its own. The caller must hold the lock.
        """
        claim(self.checkpoints_path, self.path, new=new)

    @property
    def holds_run(self) -> bool:
        """True if a run has been started here."""
        return _exists(self.config_path)

    @property
    def is_rebuildable(self) -> bool:
        """True if a run has been started here that can be rebuilt from its config: not one made in Python."""
        if not self.config_path.is_file():
            # only regular files are read: the code that loads the config reports other problems
            return self.holds_run
        with self.config_path.open("rb") as file:
            return not file.readline().startswith(_MADE_IN_PYTHON.encode())

    def check_rebuildable(self) -> None:
        """Raise RunFolderError for a run made in Python, whose model and data its config does not name."""
        if self.config_path.is_file() and not self.is_rebuildable:  # reading a pipe might block forever
            raise RunFolderError(
                f"{self.path} holds a run made in Python, so its model and data are not in its config.yaml; "
                f"run its script with Trainer(…, output_dir={str(self.path)!r}, resume=True), or load_checkpoint there"
            )

    @property
    def is_finished(self) -> bool:
        """True if the run reached its end."""
        return self.read_result().get("status") == FINISHED

    @property
    def is_used(self) -> bool:
        """True if a run has made progress here: a checkpoint, the record of a step, or a result."""
        if self.result_path.exists() or holds_checkpoints(self.checkpoints_path, self.path):
            return True
        return self.metrics_path.exists() and any(_step(record) > 0 for record in self.read_metrics())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process; raise RunFolderError if another one holds it, or it cannot be written.

        The lock is released when the block ends or the process dies, even by `kill -9`.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(FolderLock(self.lock_path))
            except LockHeld as held:
                raise RunFolderError(
                    f"run folder {self.path} is in use by process {held.holder}; wait until it ends, stop it, "
                    f"or choose another --run-dir"
                ) from None
            except OSError as error:
                raise RunFolderError(
                    f"cannot write run folder {self.path}: {error.strerror or error}; "
                    f"make it writable, or copy it to a writable location"
                ) from error
            self.is_held = True
            try:
                yield
            finally:
                self.is_held = False

    def write_config(self, config: Mapping[str, Any], *, rebuildable: bool = True) -> None:
        """Write the resolved config, unless it exists already; from now on the folder holds a run.

        `rebuildable` is False for a run made in Python, which cannot be rebuilt from its config.
        """
        from etude.config import dump_yaml

        text = dump_yaml(dict(config))
        text = text if rebuildable else f"{_MADE_IN_PYTHON}\n{text}"
        if not self.holds_run or self.config_path.read_bytes() != text.encode():
            self._write(self.config_path, text)

    def write_environment(self, device: torch.device | None = None) -> None:
        """Write versions, device, commit and command line, and changes that are not committed."""
        environment = collect_environment(device)
        self._write(self.environment_path, _json(environment))
        diff = uncommitted() if (environment["git"] or {}).get("dirty") else ""
        with suppress(OSError):  # it is good to have, but no reason to fail
            if diff:
                write_text(self.diff_path, diff)
            else:
                self.diff_path.unlink(missing_ok=True)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the outcome; `"status": "finished"` marks a run that reached its end."""
        self._write(self.result_path, _json(plain(result)))

    def write_files(self, files: Mapping[str, str], within: str = "") -> list[Path]:
        """Write files of metrics, name to text, such as a confusion matrix, into `metrics/`; return their paths."""
        paths = {self.path / "metrics" / within / name: text for name, text in files.items()}
        try:
            note_written(self.path, [path.relative_to(self.path).as_posix() for path in paths])
            for path, text in paths.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
        except OSError as error:
            raise self._cannot_write(error) from error
        return list(paths)

    def note_launch(self, launchers: Iterable[str], process: str) -> None:
        """Record which launchers have processes at work here, besides earlier ones, and which process writes."""
        known = dict.fromkeys([*self.read_launch()[0], *launchers])
        self._write(self.launch_path, _json({"launchers": list(known), "process": process}))

    def read_launch(self) -> tuple[list[str], str]:
        """Return the launchers whose processes have run here, and the process that wrote last; empty for others."""
        try:
            found = decode(self.launch_path.read_bytes()) or {}
        except OSError:
            found = {}
        return list(found.get("launchers", [])), str(found.get("process", ""))

    def read_result(self) -> dict[str, Any]:
        """Return the outcome; empty while there is none."""
        try:
            return decode(self.result_path.read_bytes()) or {}
        except FileNotFoundError:
            return {}

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the records written so far, in order."""
        return read_jsonl(self.metrics_path)

    def trim(self, step: int) -> None:
        """Prepare to continue from a checkpoint: drop records after `step`, and truncated lines.

        Events are kept, also those of work that is repeated. Only phases that started after `step` are dropped, since
        they start again.
        """
        try:
            for path in (self.metrics_path, self.media_path):
                if path.exists():
                    _trim_jsonl(path, keep=lambda record: _step(record) <= step)
            if self.events_path.exists():
                _trim_jsonl(self.events_path, keep=lambda event: event.get("kind") != "phase" or _step(event) <= step)
        except OSError as error:
            raise self._cannot_write(error) from error

    def remove_run(self) -> None:
        """Remove the files that a run has written here and nothing else; the caller must hold the lock."""
        if not self.holds_run and not self.is_used:
            return
        files = [self.events_path, self.media_path, self.status_path, self.environment_path, self.diff_path]
        files.append(self.launch_path)
        files += (self.path / SINKS).glob("*.json")  # another run has other ids
        try:
            for name in made_in(self.checkpoints_path, self.path):
                path = self.checkpoints_path / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            remove_written(self.path)
            for name in (EXAMPLE, STACKS):
                (self.path / name).unlink(missing_ok=True)
            # Last the files that mark a run: if this is interrupted, it can be repeated.
            for path in (*files, self.samples_path, self.metrics_path, self.result_path, self.config_path):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _write(self, path: Path, text: str) -> None:
        try:
            write_text(path, text)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> RunFolderError:
        again = f"`etude resume {quote(str(self.path))}`" if self.is_used else "try again"
        return RunFolderError(
            f"cannot write in run folder {self.path}: {error.strerror or error}; "
            f"check disk space and permissions, then {again}"
        )


def default_runs_dir(experiment: str, root: str | Path = "runs") -> Path:
    """Return the folder of the runs of an experiment."""
    parts = [re.sub(r"[^\w.+=-]+", "-", part) for part in Path(experiment).parts]
    return Path(root, *(part for part in parts if part.strip(".-")))


def default_run_dir(experiment: str, root: str | Path = "runs") -> Path:
    """Create and return a new folder `runs/<experiment>/<timestamp>`, never an existing one.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     first, second = default_run_dir("lenet5/baseline", root), default_run_dir("lenet5/baseline", root)
    ...     first.parent.relative_to(root).as_posix(), first == second
    ('lenet5/baseline', False)
    """
    parent = default_runs_dir(experiment, root)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            path = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
            with suppress(
                FileExistsError
            ):  # mkdir succeeds for only one of several processes that start in the same second
                path.mkdir()
                break
    except OSError as error:
        raise RunFolderError(
            f"cannot create a run folder in {parent}: {error.strerror or error}; choose a writable --run-dir"
        ) from error
    return path


def newest_run(folder: str | Path) -> RunFolder | None:
    """Return the run one or two levels below `folder` whose config was written last, or None."""
    found = [path for depth in ("*", "*/*") for path in Path(folder).glob(f"{depth}/config.yaml")]
    return RunFolder(max(found, key=os.path.getmtime).parent) if found else None


def _exists(path: Path) -> bool:
    """Return whether the file or folder exists; False also for an invalid name, where pathlib raises."""
    try:
        return path.exists()
    except OSError:
        return False


def _trim_jsonl(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    with path.open("rb") as old, replacing(path) as new:
        for line in old:
            record = decode(line) if line.endswith(b"\n") else None
            if record is not None and keep(record):
                new.write(line)


def _step(record: Mapping[str, Any]) -> int:
    return record.get("step") or 0


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
