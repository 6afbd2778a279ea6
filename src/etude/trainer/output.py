"""`Output`: what a run leaves behind. Its folder, who may write there, records, display, checkpoints and result."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.callbacks import ProgressDisplay, RunRecorder
from etude.checkpoint import Checkpoint, CheckpointManager, find_checkpoints, locate_checkpoint, read_checkpoint
from etude.checkpoint.store import is_intact
from etude.checkpoint.trust import errors_of
from etude.config import dump_yaml
from etude.config.selection import plain
from etude.core import Clock, ConfigError, RunFolderError
from etude.core.run_layout import folder_name
from etude.engine.callback import Callback, CallbackList
from etude.engine.state import Saver, TrainState
from etude.monitor import FINISHED, RunFolder
from etude.trainer.arguments import expect
from etude.trainer.config import TrainerConfig
from etude.trainer.machine import Machine

logger = logging.getLogger("etude")

Folder = str | Path | RunFolder | None
"""A run folder, or where to make one; None if nothing is to be written."""
_SAVING = ("checkpoint_interval", "save_every_steps", "keep_best")


class Output:
    """The run folder of a trainer, its right to write there, and what is written and shown.

    A folder is free while no run has finished a step in it. A used one may be written by the trainer that used it, by
    one that has loaded a checkpoint of it, and by one that was given `overwrite`, which removes the earlier run. A
    folder that is held already, as the command line does, is its holder's responsibility. Without a folder nothing is
    written.
    """

    def __init__(
        self,
        output_dir: Folder,
        config: TrainerConfig,
        machine: Machine,
        name: str = "run",
        progress: bool | Callback = False,
        overwrite: bool = False,
        resume: bool = False,
        whole_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the folder if there is none; nothing is written into it yet.

        `progress` shows a live display, or is a callback that does. `overwrite` and `resume` say what is to become of a
        run that is there. `whole_config` is the config that the run can be built from again, if there is one.
        """
        _check_switches(output_dir, config, overwrite, resume)
        if machine.world.is_main:
            _warn_of_ignored(output_dir, config)
        self._machine = machine
        self._world = machine.world
        self.folder = _as_folder(output_dir, config.checkpoint_dir)
        self.name = name
        self.is_resumed = False
        """Whether training goes on: from a checkpoint, or from an earlier `train`."""
        self.metrics: dict[str, float] = {}
        """The last numbers of what it goes on from: the result if nothing is left to train."""
        self._came_from: Path | None = None
        self._whole_config = None if whole_config is None else dict(whole_config)
        self._overwrite = overwrite
        self._goes_on = resume
        display = ProgressDisplay() if progress is True else progress or None
        self._display = display if self._world.is_main else None
        recorder = RunRecorder(self.folder) if self.folder is not None and self._world.is_main else None
        self.callbacks: list[Callback] = [one for one in (recorder, self._display) if one is not None]
        """What records the run and shows it; they come last."""

    @property
    def path(self) -> Path | None:
        """The run folder."""
        return None if self.folder is None else self.folder.path

    def say(self, sentence: str) -> None:
        """Tell the user something at once, as from a signal handler."""
        if isinstance(self._display, ProgressDisplay):
            self._display.note(sentence)
        elif self._world.is_main:
            logger.warning(sentence)

    # ------------------------------------------------------------------------------------------------ writing

    @contextlib.contextmanager
    def held(self, clock: Clock, config: TrainerConfig) -> Iterator[None]:
        """Keep other processes out of the folder while a trainer, which stands at `clock`, writes.

        The folder then says what the run is: `config.yaml` and `env.json`. Raises RunFolderError if the folder is in
        use, or holds a run that is not the trainer's.
        """
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                folder = self.folder
                self._world.attempt(lambda: self._take(folder, stack, clock, config), here=self._world.is_main)
            yield

    def saver(
        self, state: TrainState, config: TrainerConfig, meta: Mapping[str, Any] | None = None, *, again: bool = False
    ) -> Saver | None:
        """Return what writes checkpoints, with facts of `meta`; None if there is no folder or none are wanted.

        It leaves out the moment that the run has come from, unless that is to be saved `again`.
        """
        if self.folder is None or not config.save_checkpoints:
            return None
        manager = CheckpointManager(self.folder.checkpoints_path, keep_best=config.keep_best)
        is_saved = not again and self._came_from is not None and self._holds(self._came_from)
        resumed = self.metrics if is_saved else None  # the state is, unchanged, that of a checkpoint there
        return Saver(manager, state, meta, resumed=resumed, config=dump_yaml(self._described(config)))

    def finish(self, clock: Clock, callbacks: CallbackList, metrics: Mapping[str, float]) -> None:
        """Write `result.json`, unless a signal ended the training; the next training goes on from here."""
        saved = None if self.folder is None else self.folder.checkpoints_path / folder_name(clock.step)
        self.is_resumed, self._came_from, self.metrics = True, saved, dict(metrics)
        if self.folder is None:
            return
        folder, control = self.folder, callbacks.control
        result = {
            "status": FINISHED,
            "reason": control.reason,
            "step": clock.step,
            "epoch": clock.epoch,
            "metrics": dict(metrics),
            **callbacks.outcome(),
        }
        # Also where nothing is written: no process may end while another is still at work, its launcher would end both.
        here = self._world.is_main and not control.interrupted
        self._world.attempt(lambda: folder.write_result(result), here=here)

    def _take(self, folder: RunFolder, stack: contextlib.ExitStack, clock: Clock, config: TrainerConfig) -> None:
        if not folder.is_held:
            stack.enter_context(folder.lock())
            self._claim(folder, clock.step)
            self._goes_on = True
        if self._whole_config is not None or not folder.is_rebuildable:  # else the file says more than Python knows
            folder.write_config(self._described(config), rebuildable=self._whole_config is not None)
        if clock.step == 0 or not folder.environment_path.exists():
            folder.write_environment(self._machine.device)

    def _claim(self, folder: RunFolder, step: int) -> None:
        """Take the folder for this run; raise RunFolderError if it is another one's."""
        folder.claim_checkpoints(new=not self._goes_on)
        if self._goes_on:
            self._refuse_newer(folder, step)
        elif self._overwrite:
            folder.remove_run()
        elif folder.is_rebuildable or folder.is_used:
            raise RunFolderError(
                f"{self.path} already holds a run; resume=True or load_checkpoint({str(self.path)!r}) goes on with it, "
                f"overwrite=True removes it, another output_dir leaves it alone"
            )

    def _refuse_newer(self, folder: RunFolder, step: int) -> None:
        """Raise RunFolderError if the run has got further than `step`: its checkpoints would mix with new ones."""
        for newer, path in find_checkpoints(folder.checkpoints_path).items():
            if newer > step and is_intact(path):
                raise RunFolderError(
                    f"{self.path} holds a checkpoint of step {newer}, and training is to go on from step {step}; "
                    f"load the newest one, or give another output_dir to branch off"
                )

    def _described(self, config: TrainerConfig) -> dict[str, Any]:
        """Return the config of the run: the whole one, or what is known of it in Python."""
        own = {"name": self.name, "training": plain(config)}
        return own if self._whole_config is None else self._whole_config

    # ------------------------------------------------------------------------------------------------ going on

    def to_resume(self) -> Path | None:
        """Return the folder if it holds a checkpoint, intact or not; the same on every rank."""
        folder = self.folder
        if folder is None:
            return None
        found = self._world.attempt(lambda: find_checkpoints(folder.checkpoints_path), here=self._world.is_main)
        return folder.path if self._world.share_text("yes" if found else "") else None

    def read(self, path: Path, check: Callable[[Mapping[str, Any], Path], None] | None = None) -> Checkpoint:
        """Read the checkpoint that a path stands for: itself, or the newest intact one of a run or of a folder.

        All ranks read the same one. `check` is given its facts and place, to refuse it.
        """
        found = self._world.attempt(lambda: self._locate(path), here=self._world.is_main)
        place = Path(self._world.share_text(str(found)))
        checkpoint = self._world.attempt(lambda: read_checkpoint(place))
        assert checkpoint is not None
        if check is not None:
            with errors_of(place, "meta"):
                check(checkpoint.meta, checkpoint.path)
        return checkpoint

    def loaded(self, checkpoint: Path, metrics: Mapping[str, float]) -> None:
        """Note that the trainer goes on from a checkpoint: if it is one of this folder, so does the folder's run."""
        self.is_resumed, self._came_from, self.metrics = True, checkpoint, dict(metrics)
        if self._holds(checkpoint):
            self._goes_on = True

    def _holds(self, checkpoint: Path) -> bool:
        return self.folder is not None and checkpoint.resolve().parent == self.folder.checkpoints_path.resolve()

    def _locate(self, path: Path) -> Path:
        if self.folder is not None and path.resolve() == self.folder.path.resolve():
            path = self.folder.checkpoints_path
        elif (run := RunFolder(path)).holds_run:
            path = RunFolder.open(path).checkpoints_path
        elif run.checkpoints_path.is_dir():
            path = run.checkpoints_path
        return locate_checkpoint(path)


def _check_switches(output_dir: Any, config: TrainerConfig, overwrite: Any, resume: Any) -> None:
    """Raise ConfigError for what contradicts."""
    for name, value in (("overwrite", overwrite), ("resume", resume)):
        expect(name, value, isinstance(value, bool), "True or False")
    if overwrite and resume:
        raise ConfigError("overwrite=True removes the run in output_dir and resume=True goes on with it: keep one")
    if output_dir is None and (overwrite or resume):
        raise ConfigError(f"{'overwrite' if overwrite else 'resume'}=True needs an output_dir")
    if output_dir is None and config.checkpoint_dir is not None:
        raise ConfigError("training.checkpoint_dir needs a run folder: give the Trainer an output_dir")


def _warn_of_ignored(output_dir: Any, config: TrainerConfig) -> None:
    """Warn of settings that were given and have nothing to act on."""
    given = " and ".join(f"training.{name}" for name in config.changed(_SAVING))
    if given and output_dir is None and config.save_checkpoints:
        logger.warning("nothing is saved without an output_dir, so %s does nothing", given)
    elif given and output_dir is not None and not config.save_checkpoints:
        logger.warning("training.save_checkpoints is false, so %s does nothing", given)


def _as_folder(output_dir: Any, checkpoint_dir: str | None) -> RunFolder | None:
    if output_dir is None or isinstance(output_dir, RunFolder):
        return output_dir
    expect("output_dir", output_dir, isinstance(output_dir, (str, os.PathLike)), "a path")
    return RunFolder.ensure(Path(output_dir), checkpoint_dir)
