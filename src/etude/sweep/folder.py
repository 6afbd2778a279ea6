"""The folder of a sweep: its files, its study, and which process runs which trial.

sweep.yaml       the sweep
experiment.yaml  the config of the experiment when the sweep began, to notice a change
journal.jsonl    the trials, as optuna's journal; not with another storage
trials.json      the trials for readers without optuna, such as the dashboard
trial-0007/      the run folder of a trial, or one seed-0, seed-1 … for each of its seeds
"""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.errors import ConfigError, RunFolderError
from etude.core.files import FolderLock, LockHeld, write_text
from etude.core.spelling import shorten
from etude.monitor.jsonl import drop_torn_line
from etude.monitor.reading import CONFIG
from etude.sweep.spec import SPEC, SweepSpec, read_spec

if TYPE_CHECKING:
    from optuna import Study

_OWNER = ".sweep"
"""File in the folder of a trial, locked by the process that runs it."""
_IDENTITY = "sweep"
"""Attribute of a study: the sweep whose trials it holds."""


class SweepFolder:
    """Paths and locks of one sweep."""

    def __init__(self, path: str | Path, storage: str | None = None) -> None:
        """`storage` is the URL of a database for optuna, instead of the journal."""
        self.path, self.storage = Path(path), storage
        self.spec_path = self.path / SPEC
        self.experiment_path = self.path / "experiment.yaml"
        self.journal_path = self.path / "journal.jsonl"

    def read(self) -> SweepSpec:
        """Return the sweep; raise RunFolderError if there is none here."""
        if not self.spec_path.is_file():
            raise RunFolderError(f"{self.path} is not the folder of a sweep: it has no {SPEC}")
        return read_spec(str(self.path))

    def begin(self, spec: SweepSpec, config: str) -> None:
        """Write the files of a new sweep, or check that the folder holds the same one.

        `config` is the whole config of the experiment. Raises RunFolderError if a run or another sweep is there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.locked():
                if self.spec_path.exists():
                    self._check(spec, config)
                elif (self.path / CONFIG).exists():
                    raise RunFolderError(f"{self.path} holds a run; choose another --dir")
                else:
                    write_text(self.experiment_path, config)
                write_text(self.spec_path, spec.to_yaml())
        except OSError as error:
            if isinstance(error, RunFolderError):
                raise
            raise RunFolderError(
                f"cannot write {self.path}: {error.strerror or error}; choose another --dir"
            ) from error

    def _check(self, spec: SweepSpec, config: str) -> None:
        has_journal = self.journal_path.exists()
        if self.storage is not None and has_journal:
            raise RunFolderError(f"the trials of {self.path} are in {self.journal_path}; leave out --storage")
        if self.storage is None and not has_journal and any(self.path.glob("trial-*")):
            raise RunFolderError(
                f"{self.path} has trials but no {self.journal_path.name}: pass the same --storage if they are in a "
                "database; if the file is lost, choose another --dir"
            )
        if not self.experiment_path.is_file():
            raise RunFolderError(
                f"no sweep has begun in {self.path}, although it has a {SPEC}: pass {self.spec_path} and another --dir"
            )
        before, now = self.read().identity(), spec.identity()
        if changed := [key for key in now if now[key] != before[key]]:
            raise RunFolderError(
                f"{self.path} holds another sweep ({', '.join(changed)} differ); choose another --dir"
            )
        self.check_experiment(spec, config)

    def check_experiment(self, spec: SweepSpec, config: str) -> None:
        """Raise RunFolderError if the experiment was edited: its trials could not be compared any more."""
        if self.experiment_path.read_text(encoding="utf-8") != config:
            raise RunFolderError(
                f"{spec.experiment} has changed since the sweep in {self.path} began (its config was "
                f"{self.experiment_path}); undo the change, or choose another --dir"
            )

    def check_study(self, study: "Study", spec: SweepSpec, name: str | None = None) -> None:
        """Raise RunFolderError if a study holds another sweep: our sweep.yaml was edited, or a database is shared.

        With the `name` of the experiment it is kept in a new study. The path of its file may differ between machines.
        """
        now = json.loads(json.dumps({**spec.identity(), "experiment": name}))
        if _IDENTITY not in study.user_attrs and name is not None:
            study.set_user_attr(_IDENTITY, now)
        before = study.user_attrs.get(_IDENTITY, now)
        if changed := [key for key in now if now[key] != before[key] and (key, name) != ("experiment", None)]:
            raise RunFolderError(
                f"the study of {self.path} holds another sweep ({', '.join(changed)} differ from {self.spec_path}); "
                "choose another --dir, or undo the change"
            )
        spec.space = {key: spec.space[key] for key in before["space"]}  # the order of a grid

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process starts a trial."""
        with FolderLock(self.path / ".lock", wait=True):
            yield

    def study(self, mode: str | None = None) -> "Study":
        """Return the study; with a `mode`, min or max, it is created if there is none."""
        optuna = import_optuna()
        if mode is None and self.storage is None and not self.journal_path.exists():
            raise RunFolderError(
                f"{self.path} has no {self.journal_path.name}; pass --storage if the sweep was made with it"
            )
        # Another process may make the tables of a new database at the same time: they are there the second time.
        for is_last in (self.storage is None or mode is None, True):
            try:
                return self._open(optuna, mode)
            except Exception as error:  # of optuna, SQLAlchemy or the driver of a database
                if is_last:
                    where = "--storage" if self.storage else self.journal_path
                    if isinstance(error, KeyError):
                        raise ConfigError(f"{where}: there is no study '{self._study_name}'") from error
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    raise ConfigError(f"{where}: cannot open the study: {shorten(lines[0], 200)}") from error
        raise AssertionError

    def _open(self, optuna: Any, mode: str | None) -> "Study":
        storage = self.storage or optuna.storages.JournalStorage(self._journal())
        name = self._study_name
        if mode is None:
            study: Study = optuna.load_study(study_name=name, storage=storage)
        else:
            study = optuna.create_study(
                study_name=name, storage=storage, direction=f"{mode}imize", load_if_exists=True
            )
        return study

    @property
    def _study_name(self) -> str:
        return self.path.resolve().name if self.storage else "sweep"

    def _journal(self) -> Any:
        from optuna.storages.journal import JournalFileBackend

        lock: Any = _JournalLock(self.journal_path)
        return JournalFileBackend(str(self.journal_path), lock_obj=lock)

    def trial_path(self, number: int) -> Path:
        """Return the folder of a trial."""
        return self.path / f"trial-{number:04d}"

    def runs(self, number: int, seeds: int) -> list[Path]:
        """Return the run folders of a trial."""
        path = self.trial_path(number)
        return [path] if seeds == 1 else [path / f"seed-{seed}" for seed in range(seeds)]

    def own(self, number: int) -> FolderLock | None:
        """Take a trial: return the lock that other processes see while it runs here, None if another one runs it.

        The caller holds the lock of the sweep.
        """
        path = self.trial_path(number)
        path.mkdir(exist_ok=True)
        lock = FolderLock(path / _OWNER, keep=False)
        try:
            return lock.__enter__()
        except LockHeld:
            return None

    def is_owned(self, number: int) -> bool:
        """Whether a process runs this trial now; if not, any may continue it."""
        if not (self.trial_path(number) / _OWNER).exists():
            return False
        try:
            with self.locked():
                if (lock := self.own(number)) is not None:
                    lock.__exit__(None, None, None)
        except OSError:  # a folder that can only be read
            return True
        return lock is None

    def check_new(self, number: int, seeds: int) -> None:
        """Raise RunFolderError if there is a run where a new trial would be: its result would be taken for another."""
        for run in self.runs(number, seeds):
            if (run / CONFIG).exists():
                raise RunFolderError(f"{run} holds a run that the study does not know; choose another --dir")

    def is_full(self) -> bool:
        """Whether the disk has no room for a small file."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(bytes(2**16))
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        return False

    def has(self, number: int) -> bool:
        """Whether a trial was started in this folder: those of another one may share a database."""
        return self.storage is None or self.trial_path(number).is_dir()


class _JournalLock:
    """Locks a journal until its process ends, however that ends; a line that was cut off by a full disk is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FolderLock(path.with_suffix(".lock"), wait=True)

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._lock.__enter__()
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            drop_torn_line(self._path, descriptor)
        finally:
            os.close(descriptor)
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._lock.__exit__(None, None, None)


def import_optuna() -> Any:
    """Return optuna; raise ConfigError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("a sweep needs optuna: pip install 'etude[sweep]'") from error
    return optuna
