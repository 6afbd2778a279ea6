"""Whole runs in a run folder: start one, resume one, evaluate one."""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.checkpoint import CheckpointManager, folder_name, newest_intact, read_checkpoint
from etude.core import CheckpointError, ConfigError, EtudeError, RunFolderError
from etude.distributed import World, join_world, leave_world
from etude.experiment.build import build_data, build_trainer
from etude.experiment.config import ExperimentConfig, load_config_file, load_experiment_config
from etude.monitor import RunFolder, default_run_dir
from etude.trainer import Trainer, resolve_device

logger = logging.getLogger("etude")


@dataclass(slots=True)
class RunOutcome:
    """How a run ended."""

    run_dir: Path
    status: str
    """finished, or interrupted."""
    step: int
    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    is_main: bool = True


def train_experiment(
    experiment: str | Path | ExperimentConfig,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> RunOutcome:
    """Train an experiment in a new run folder and return how it ended."""
    config = (
        experiment
        if isinstance(experiment, ExperimentConfig)
        else load_experiment_config(experiment, overrides=overrides)
    )
    with _world(config) as world:
        folder = _on_main(world, lambda: _new_folder(config, run_dir, overwrite))
        with _held(folder, world):
            if world.is_main:
                folder.write_config(config.to_dict())
            trainer = build_trainer(config, folder=folder, world=world, progress=progress)
            if world.is_main:
                folder.write_environment(trainer.device)
            return _run(trainer, folder)


def resume_run(run_dir: str | Path, overrides: Sequence[str] = (), *, progress: bool = True) -> RunOutcome:
    """Go on with a run from its newest intact checkpoint, or from the start if it has none yet.

    Raises RunFolderError if the run is finished and the overrides do not make it longer.
    """
    folder = RunFolder.open(run_dir)
    config = load_config_file(folder.config_path, overrides=overrides)
    with _world(config) as world, _held(folder, world):
        trainer = build_trainer(config, folder=folder, world=world, progress=progress)
        found = _newest_checkpoint(folder)
        if found is not None:
            changed = any(override.lstrip().startswith("optimizer") for override in overrides)
            trainer.load_checkpoint(found, keep_hyperparameters=changed)
        clock = trainer.state.clock
        if folder.is_finished and (trainer.total_steps is None or clock.step >= trainer.total_steps or not overrides):
            raise RunFolderError(
                f"run {folder.path} is finished ({clock.epoch} epochs, {clock.step} steps); to train longer, give a "
                f"new end: `etude resume {folder.path} training.epochs={clock.epoch + 5}`"
            )
        if world.is_main:
            folder.trim(clock.step)
            if overrides:
                folder.write_config(config.to_dict())
        world.barrier()
        return _run(trainer, folder)


def evaluate_run(run_dir: str | Path, *, split: str = "test", which: str = "best") -> tuple[Path, dict[str, float]]:
    """Evaluate a checkpoint of a run (`best`, `last` or a step number) on a split; return its path and the numbers."""
    folder = RunFolder.open(run_dir)
    config = load_config_file(folder.config_path)
    with _world(config) as world:
        trainer = build_trainer(config, folder=None, world=world, progress=False)
        path = _find_checkpoint(folder, which)
        trainer.state.restore(read_checkpoint(path))
        loader = build_data(config, world).loader(split)
        if loader is None:
            raise ConfigError(f"the data of this run has no {split} split")
        return path, trainer.evaluate(loader)


def _run(trainer: Trainer, folder: RunFolder) -> RunOutcome:
    metrics = trainer.train()
    clock, reason = trainer.state.clock, trainer.callbacks.control.reason
    interrupted = reason.startswith(("SIG", "signal"))
    outcome = RunOutcome(folder.path, "interrupted" if interrupted else "finished", clock.step, clock.epoch)
    outcome.reason, outcome.is_main = reason, trainer.world.is_main
    outcome.metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
    if not interrupted and trainer.world.is_main:
        folder.write_result(
            {"status": "finished", "reason": reason, "step": clock.step, "epoch": clock.epoch, "metrics": metrics}
        )
    return outcome


@contextlib.contextmanager
def _world(config: ExperimentConfig) -> Iterator[World]:
    world = join_world(resolve_device(config.training.device).type)
    try:
        yield world
    finally:
        leave_world()


def _new_folder(config: ExperimentConfig, run_dir: str | Path | None, overwrite: bool) -> RunFolder:
    return RunFolder.create(run_dir if run_dir is not None else default_run_dir(config.name), overwrite=overwrite)


def _on_main(world: World, make: Any) -> RunFolder:
    """Make the folder on one process and tell the others its path, or its error."""
    error, path = "", ""
    if world.is_main:
        try:
            path = str(make().path)
        except EtudeError as failure:
            error = str(failure)
    if shared := world.share_text(error):
        raise RunFolderError(shared)
    return RunFolder(world.share_text(path))


@contextlib.contextmanager
def _held(folder: RunFolder, world: World) -> Iterator[None]:
    """Hold the folder's lock on the process that writes; the others fail with it if it is taken."""
    with contextlib.ExitStack() as stack:
        error = ""
        if world.is_main:
            try:
                stack.enter_context(folder.lock())
            except RunFolderError as failure:
                error = str(failure)
        if shared := world.share_text(error):
            raise RunFolderError(shared)
        try:
            yield
        except KeyboardInterrupt as stop:
            stop.add_note(f"what was saved before is intact, go on with: etude resume {folder.path}")
            raise


def _newest_checkpoint(folder: RunFolder) -> Path | None:
    manager = CheckpointManager(folder.checkpoints_path)
    if not manager.all():
        logger.warning("%s has no checkpoint yet: starting from the beginning", folder.path)
        return None
    path, warnings = newest_intact(folder.checkpoints_path)
    for warning in warnings:
        logger.warning(warning)
    return path


def _find_checkpoint(folder: RunFolder, which: str) -> Path:
    manager = CheckpointManager(folder.checkpoints_path)
    if which == "best" and (best := manager.best()) is not None:
        return best
    if which in ("best", "last"):
        path, _ = newest_intact(folder.checkpoints_path)
        return path
    for entry in manager.all():
        if which.isdigit() and entry.step == int(which):
            return manager.root / folder_name(entry.step)
    steps = ", ".join(str(entry.step) for entry in manager.all()) or "none"
    raise CheckpointError(f"{folder.path} has no checkpoint '{which}' (steps there are: {steps}; or best, last)")
