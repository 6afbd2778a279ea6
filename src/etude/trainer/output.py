"""`Output`: the run folder, who may write there, records, display, checkpoints and result."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from etude.callbacks import ProgressDisplay, RunRecorder
from etude.callbacks.best import BestMetric, copy_of_weights
from etude.checkpoint import (
    Checkpoint,
    CheckpointManager,
    find_checkpoints,
    load_model_state,
    locate_checkpoint,
    read_checkpoint,
)
from etude.checkpoint.background import BackgroundWriter
from etude.checkpoint.store import is_intact
from etude.checkpoint.trust import errors_of
from etude.config import dump_yaml
from etude.config.selection import plain
from etude.core import CheckpointError, Clock, ConfigError, RunFolderError
from etude.core.model import sums_of_bits
from etude.core.run_layout import folder_name, step_of
from etude.distributed.shards import has_shards, local_of
from etude.engine.callback import Callback
from etude.engine.callback_list import CallbackList
from etude.engine.state import Saver, TrainState
from etude.monitor import FINISHED, RunFolder
from etude.trainer.arguments import expect
from etude.trainer.config import TrainerConfig
from etude.trainer.machine import Machine

logger = logging.getLogger("etude")

Folder = str | Path | RunFolder | None
"""A run folder, or a path for one; None if nothing is written."""
_SAVING = ("checkpoint_interval", "save_every_steps", "async_save", "keep_best", "trainable_only")


class Output:
    """The run folder of a trainer, its permission to write there, and what is written and displayed.

    A folder is free until a run has finished a step in it. After that only the same trainer may write to it, or one
    that has loaded a checkpoint from it, or one with `overwrite`, which removes the earlier run. A folder that the
    caller has already locked, such as the command line, is not checked. Without a folder nothing is written.
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
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the folder if there is none; nothing is written into it yet.

        `progress` shows a live display, or is a callback that does. `overwrite` and `resume` tell what to do with an
        existing run. `whole_config` is the config from which the run can be rebuilt, if there is one; `recipe` is what
        the trainer was given, by `etude.trainer.recipe`.
        """
        _check_switches(output_dir, config, overwrite, resume)
        if machine.world.is_main:
            _warn_of_ignored(output_dir, config)
        self._machine = machine
        self._world = machine.world
        self.folder = _as_folder(output_dir, config.checkpoint_dir)
        self.name = name
        self.is_resumed = False
        """Whether training continues from a checkpoint, or from an earlier `train`."""
        self.metrics: dict[str, float] = {}
        """The last metrics of what it continues from: the result if nothing is left to train."""
        self._came_from: Path | None = None
        self._last_weights: dict[str, Tensor] | None = None
        self._loaded: list[int] = []
        """What the best weights in the model sum to."""
        self._background = BackgroundWriter()
        self._whole_config = None if whole_config is None else dict(whole_config)
        self._recipe = dict(recipe or {})
        self._overwrite = overwrite
        self._goes_on = resume
        display = ProgressDisplay() if progress is True else progress or None
        self._display = display if self._world.is_main else None
        recorder = RunRecorder(self.folder) if self.folder is not None and self._world.is_main else None
        keeps = None if not config.restore_best else "file" if self.saves(config) else "memory"
        self.judge = BestMetric(config.judge(), required=config.monitor is not None, keeps=keeps)
        """Follows the metric by which the run is judged, on every rank."""
        self.callbacks: list[Callback] = [one for one in (self.judge, recorder, self._display) if one is not None]
        """Callbacks that record and display the run; they come last."""

    def saves(self, config: TrainerConfig) -> bool:
        """Whether checkpoints are written."""
        return self.folder is not None and config.save_checkpoints

    @property
    def path(self) -> Path | None:
        """The run folder."""
        return None if self.folder is None else self.folder.path

    def say(self, sentence: str) -> None:
        """Notify the user at once, for example from a signal handler."""
        if isinstance(self._display, ProgressDisplay):
            self._display.note(sentence)
        elif self._world.is_main:
            logger.warning(sentence)

    # ------------------------------------------------------------------------------------------------ writing

    @contextlib.contextmanager
    def held(self, clock: Clock, config: TrainerConfig) -> Iterator[None]:
        """Lock the folder against other processes while a trainer, at `clock`, writes.

        `config.yaml` and `env.json` are written. Raises RunFolderError if the folder is in use, or holds a run of
        another trainer.
        """
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                folder = self.folder
                self._world.attempt(lambda: self._take(folder, stack, clock, config), here=self._world.is_main)
            yield

    def saver(
        self, state: TrainState, config: TrainerConfig, meta: Mapping[str, Any] | None = None, *, again: bool = False
    ) -> Saver | None:
        """Return a checkpoint writer with `meta`; None if there is no folder or checkpoints are disabled.

        It does not save the state that the run was resumed from, unless `again` is set.
        """
        if self.folder is None or not self.saves(config):
            return None
        best, path = self.judge.best, self.folder.checkpoints_path
        manager = CheckpointManager(path, keep_best=config.keep_best, monitor=best.name, mode=best.mode)
        is_saved = not again and self._came_from is not None and self._holds(self._came_from)
        resumed = self.metrics if is_saved else None  # the unchanged state is already saved there
        described, only = dump_yaml(self._described(config)), config.trainable_only
        background = self._background if config.async_save else None
        return Saver(
            manager,
            state,
            meta,
            resumed=resumed,
            config=described,
            trainable_only=only,
            background=background,
        )

    def finish(
        self, clock: Clock, callbacks: CallbackList, metrics: Mapping[str, float], files: Mapping[str, str]
    ) -> None:
        """Write `result.json`, unless a signal ended the training; the next training continues from here.

        `files` are those of metrics, such as a confusion matrix: name to text. They are written into `metrics/`.
        """
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
        # Even without a folder: if one process exits while another is still working, the launcher ends both.
        here = self._world.is_main and not control.interrupted
        self._world.attempt(lambda: _write(folder, result, files), here=here)

    # ------------------------------------------------------------------------------------------------ best weights

    def load_best(self, model: nn.Module, clock: Clock) -> str:
        """Load the weights of the best value of the monitored metric; return a sentence about it.

        `unload_best` undoes it.
        """
        judge = self.judge.best
        if (best := judge.best) is None:
            return f"the model keeps its last weights: '{judge.name}' has no best value"
        words = f"{judge.name} {best.value:.6g} of step {best.step} (epoch {best.epoch})"
        if best.step == clock.step:
            return f"the last weights are the best: {words}"
        weights = self.judge.weights
        if self.folder is not None and weights is None:
            try:
                path, lazy = self.folder.checkpoints_path / folder_name(best.step), has_shards([*model.parameters()])
                weights = self.read(path, lazy=lazy).model_state
            except CheckpointError as error:
                return f"the model keeps its last weights, because those of {words} cannot be read: {error}"
        if weights is None:
            return f"the model keeps its last weights: those of {words} were measured before this process began"
        self._last_weights = copy_of_weights(model)
        load_model_state(model, weights)
        self._loaded = sums_of_bits(map(local_of, model.parameters()))
        judge.restored = True
        return f"the model has its best weights again: {words}"

    def unload_best(self, model: nn.Module) -> None:
        """Give the model its last weights back, from which training continues, unless it has got others since."""
        if self._last_weights is not None:
            if sums_of_bits(map(local_of, model.parameters())) == self._loaded:
                load_model_state(model, self._last_weights)
            elif self._world.is_main:
                logger.warning(
                    "the model's weights have been changed since its best ones were loaded, so training continues "
                    "from them, and not from the last ones"
                )
            self._last_weights, self.judge.best.restored = None, False

    def _take(self, folder: RunFolder, stack: contextlib.ExitStack, clock: Clock, config: TrainerConfig) -> None:
        if not folder.is_held:
            stack.enter_context(folder.lock())
            if self.saves(config):
                self._refuse_replaced(folder)
            self._claim(folder, clock.step)
            self._goes_on = True
        # otherwise the file contains more than is known in Python
        if self._whole_config is not None or not folder.is_rebuildable:
            folder.write_config(self._described(config), rebuildable=self._whole_config is not None)
        if clock.step == 0 or not folder.environment_path.exists():
            folder.write_environment(self._machine.device)

    def _claim(self, folder: RunFolder, step: int) -> None:
        """Claim the folder for this run; raise RunFolderError if it belongs to another one."""
        folder.claim_checkpoints(new=not self._goes_on)
        if self._goes_on:
            self._refuse_newer(folder, step)
        elif self._overwrite:
            folder.remove_run()
        elif folder.is_rebuildable or folder.is_used:
            raise RunFolderError(
                f"{self.path} already holds a run; resume=True or load_checkpoint({str(self.path)!r}) continues it, "
                "overwrite=True removes it; or choose another output_dir"
            )

    def _refuse_newer(self, folder: RunFolder, step: int) -> None:
        """Raise RunFolderError if the folder has checkpoints beyond `step`: they would mix with new ones."""
        for newer, path in find_checkpoints(folder.checkpoints_path).items():
            if newer > step and is_intact(path):
                raise RunFolderError(
                    f"{self.path} holds a checkpoint of step {newer}, but training would continue from step {step}; "
                    "load the newest one, or choose another output_dir"
                )

    def _refuse_replaced(self, folder: RunFolder) -> None:
        """Raise RunFolderError if the folder has only older checkpoints than the one that training continues from."""
        mine, found = self._came_from, find_checkpoints(folder.checkpoints_path)
        if mine is not None and self._holds(mine) and found and max(found) < (step_of(mine.name) or 0):
            raise RunFolderError(
                f"{self.path} no longer holds {mine.name}, from which training would continue: another run has "
                "replaced it; make a Trainer with another output_dir"
            )

    def _described(self, config: TrainerConfig) -> dict[str, Any]:
        """Return the config of the run: the complete one, or what is known of it in Python."""
        own = {"name": self.name, "training": plain(config), **({"python": self._recipe} if self._recipe else {})}
        return own if self._whole_config is None else self._whole_config

    # ------------------------------------------------------------------------------------------------ continuing

    def to_resume(self) -> Path | None:
        """Return the folder if it holds a checkpoint, intact or not; the same on every rank."""
        folder = self.folder
        if folder is None:
            return None
        found = self._world.attempt(lambda: find_checkpoints(folder.checkpoints_path), here=self._world.is_main)
        return folder.path if self._world.share_text("yes" if found else "") else None

    def read(
        self, path: Path, check: Callable[[Mapping[str, Any], Path], None] | None = None, *, lazy: bool = False
    ) -> Checkpoint:
        """Read the checkpoint at a path: the checkpoint itself, or the newest intact one of a run or folder.

        All ranks read the same one. `check` receives its stored data and location, and may refuse it. With `lazy` the
        values of tensors are read when they are needed: for a model that is divided among ranks.
        """
        found = self._world.attempt(lambda: self._locate(path), here=self._world.is_main)
        place = Path(self._world.share_text(str(found)))
        checkpoint = read_checkpoint(place, lazy=lazy, world=self._world)
        if check is not None:
            with errors_of(place, "meta"):
                check(checkpoint.meta, checkpoint.path)
        return checkpoint

    def loaded(self, checkpoint: Path, metrics: Mapping[str, float]) -> None:
        """Record that the trainer continues from a checkpoint, and whether it is one of this folder."""
        self.is_resumed, self._came_from, self.metrics = True, checkpoint, dict(metrics)
        self._last_weights, self.judge.best.restored = None, False  # those of the checkpoint are trained
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
    """Raise ConfigError for contradictory arguments."""
    for name, value in (("overwrite", overwrite), ("resume", resume)):
        expect(name, value, isinstance(value, bool), "True or False")
    if overwrite and resume:
        raise ConfigError(
            "overwrite=True removes the run in output_dir, but resume=True continues it; keep one of them"
        )
    if output_dir is None and (overwrite or resume):
        raise ConfigError(f"{'overwrite' if overwrite else 'resume'}=True needs an output_dir")
    if output_dir is None and config.checkpoint_dir is not None:
        raise ConfigError("training.checkpoint_dir needs a run folder; pass the Trainer an output_dir")


def _warn_of_ignored(output_dir: Any, config: TrainerConfig) -> None:
    """Warn about settings that have no effect."""
    given = " and ".join(f"training.{name}" for name in config.changed(_SAVING))
    if given and output_dir is None and config.save_checkpoints:
        logger.warning("nothing is saved without an output_dir, so there is no effect of %s", given)
    elif given and output_dir is not None and not config.save_checkpoints:
        logger.warning("training.save_checkpoints is false, so there is no effect of %s", given)


def _as_folder(output_dir: Any, checkpoint_dir: str | None) -> RunFolder | None:
    if output_dir is None or isinstance(output_dir, RunFolder):
        return output_dir
    expect("output_dir", output_dir, isinstance(output_dir, (str, os.PathLike)), "a path")
    return RunFolder.ensure(Path(output_dir), checkpoint_dir)


def _write(folder: RunFolder, result: dict[str, Any], files: Mapping[str, str]) -> None:
    folder.write_files(files)
    folder.write_result(result)
