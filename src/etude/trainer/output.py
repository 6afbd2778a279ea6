"""Where a `Trainer` writes. One folder is one run: a folder that holds another one is refused."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.checkpoint import CheckpointManager, find_checkpoints, is_intact, locate_checkpoint
from etude.core import Clock, ConfigError, RunFolderError
from etude.distributed import World
from etude.monitor import RunFolder


class Output:
    """The run folder of a trainer, and its right to write there.

    A folder is free while no run has finished a step in it. A used one may be written by the trainer that used it, by
    one that has loaded a checkpoint of it, and by one that was given `overwrite`, which removes the earlier run. A
    folder that is held already, as the command line does, is its holder's responsibility.
    """

    def __init__(
        self,
        output_dir: str | Path | RunFolder | None,
        *,
        overwrite: bool,
        resume: bool,
        world: World,
        checkpoint_dir: str | None = None,
    ) -> None:
        for name, value in (("overwrite", overwrite), ("resume", resume)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; it must be True or False")
        if overwrite and resume:
            raise ConfigError(
                "overwrite=True removes the run in output_dir and resume=True goes on with it: keep one"
            )
        if output_dir is None and (overwrite or resume):
            raise ConfigError(f"{'overwrite' if overwrite else 'resume'}=True needs an output_dir")
        if output_dir is None and checkpoint_dir is not None:
            raise ConfigError("training.checkpoint_dir needs a run folder: give the Trainer an output_dir")
        self.folder = _as_folder(output_dir, checkpoint_dir)
        self._world = world
        self._overwrite = overwrite
        self._goes_on = resume
        self._name = secrets.token_hex(8)
        self._last_holder: str | None = None
        """Who must have held the folder last if its run is still ours; None if that may be anybody."""

    @property
    def path(self) -> Path | None:
        """The run folder."""
        return None if self.folder is None else self.folder.path

    def has_checkpoints(self) -> bool:
        """Return whether the folder holds a checkpoint, intact or not; the same on every rank."""
        found = self._world.attempt(self._checkpoints, here=self._world.is_main)
        return bool(self._world.share_text("yes" if found else ""))

    def _checkpoints(self) -> dict[int, Path]:
        return {} if self.folder is None else find_checkpoints(self.folder.checkpoints_path)

    def holds(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint lies in this folder."""
        return self.folder is not None and checkpoint.resolve().parent == self.folder.checkpoints_path.resolve()

    def locate(self, path: Path) -> Path:
        """Return the checkpoint that a path stands for: itself, or the newest intact one of a run or of a folder."""
        if self.folder is not None and path.resolve() == self.folder.path.resolve():
            path = self.folder.checkpoints_path
        elif (run := RunFolder(path)).holds_run:
            path = RunFolder.open(path).checkpoints_path
        elif run.checkpoints_path.is_dir():
            path = run.checkpoints_path
        return locate_checkpoint(path)

    def loaded(self, checkpoint: Path) -> None:
        """Note that the trainer goes on from a checkpoint: if it is one of this folder, so does the folder's run."""
        if self.holds(checkpoint):
            self._goes_on, self._last_holder = True, None

    @contextlib.contextmanager
    def held(self, clock: Clock) -> Iterator[None]:
        """Keep other processes out of the folder while the trainer, which stands at `clock`, writes.

        Raises RunFolderError if the folder is in use, or holds a run that is not the trainer's.
        """
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                self._world.attempt(lambda: self._take(stack, clock.step), here=self._world.is_main)
            yield

    def manager(self, keep_best: int) -> CheckpointManager | None:
        """Return the manager of the folder's checkpoints."""
        return None if self.folder is None else CheckpointManager(self.folder.checkpoints_path, keep_best=keep_best)

    def _take(self, stack: contextlib.ExitStack, step: int) -> None:
        assert self.folder is not None
        if self.folder.is_held:
            return
        before = stack.enter_context(self.folder.lock(self._name))
        self.folder.claim_checkpoints(new=not self._goes_on)
        if self._goes_on:
            if before and self._last_holder is not None and self._last_holder not in before:
                raise RunFolderError(
                    f"{self.path} has been written by another run since this one trained; "
                    f"load_checkpoint({str(self.path)!r}) goes on with that, another output_dir leaves it alone"
                )
            self._refuse_newer(step)
        elif self._overwrite:
            self.folder.remove_run()
        elif self.folder.holds_run or self.folder.is_used:
            raise RunFolderError(
                f"{self.path} already holds a run; give the Trainer resume=True to go on with it, another output_dir, "
                f"or overwrite=True, which removes the run"
            )
        self._goes_on, self._last_holder = True, self._name

    def _refuse_newer(self, step: int) -> None:
        """Raise RunFolderError if the run has got further than `step`: its checkpoints would mix with new ones."""
        for newer, path in self._checkpoints().items():
            if newer > step and is_intact(path):
                raise RunFolderError(
                    f"{self.path} holds a checkpoint of step {newer}, and training is to go on from step {step}; "
                    f"load the newest one, or give another output_dir to branch off"
                )


def _as_folder(output_dir: Any, checkpoint_dir: str | None) -> RunFolder | None:
    if output_dir is None or isinstance(output_dir, RunFolder):
        return output_dir
    if not isinstance(output_dir, (str, os.PathLike)):
        raise ConfigError(f"output_dir must be a path, found {type(output_dir).__name__}")
    return RunFolder.ensure(Path(output_dir), checkpoint_dir)
