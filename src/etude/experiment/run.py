"""Whole runs in a run folder: start one, resume one."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from etude.checkpoint import (
    CheckpointManager,
    find_checkpoints,
    newest_intact,
)
from etude.checkpoint.contents import CONFIG
from etude.config.read import read_config
from etude.core import ConfigError, DataError, RunFolderError, TrainingError
from etude.core.errors import EtudeError
from etude.core.files import write_bytes
from etude.core.monitor import Best
from etude.distributed import World, before_joining, launched_command
from etude.distributed.agreement import check_same
from etude.experiment.build import build_trainer, flat
from etude.experiment.config import ExperimentConfig, load_config, load_experiment_config
from etude.experiment.opened import joined_world
from etude.experiment.python_run import PythonRun, python_run
from etude.experiment.restart import Launch, is_restart
from etude.monitor import RunFolder, default_run_dir
from etude.monitor.environment import commit
from etude.trainer import Trainer

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
    resume_command: str = ""
    """The command to continue."""
    best: Best | None = None
    """The metric by which the run is judged, with its last and its best value."""
    samples: str = ""
    """Texts sampled from a language model at the end, if a callback did so."""


def train_experiment(
    experiment: str | Path | ExperimentConfig,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> RunOutcome:
    """Train an experiment in a new run folder and return the outcome.

    Processes that an elastic launcher has restarted continue the run that they had begun.
    """
    with before_joining():
        config = (
            experiment
            if isinstance(experiment, ExperimentConfig)
            else load_experiment_config(experiment, overrides=overrides)
        )
    with joined_world(config.training.device) as world:
        _check_same(world, config)
        if (mixed := _partly_resumed(world, run_dir, resumes=False)) is not None:
            mixed.place_checkpoints(config.training.checkpoint_dir)
            return _continue(config, mixed, world, progress=progress)
        launch = Launch.of(world)
        begun = launch.begun(config, run_dir)
        if begun is not None and world.host_max([int(begun.holds_run)])[0]:
            launch.note(begun)
            begun.place_checkpoints(config.training.checkpoint_dir)
            return _continue(config, begun, world, progress=progress)
        place = run_dir if begun is None else begun.path  # lost before it had a config
        folder = _made_by_main(world, lambda: launch.note(_new_folder(config, place, overwrite)))
        folder.place_checkpoints(config.training.checkpoint_dir)
        with _held(folder, world):
            there = {path.name for path in folder.path.iterdir()}
            trainer: Trainer | None = None
            try:
                world.attempt(lambda: folder.write_config(config.to_dict()), here=world.is_main)
                trainer = build_trainer(config, folder=folder, world=world, progress=progress)
                return _run(trainer, folder)
            except Exception as error:
                began = trainer is not None and trainer.state.clock.step > 0
                mistaken = isinstance(error, (ConfigError, DataError))
                lost = bool(launch.launchers) and not isinstance(error, EtudeError)  # the next attempt continues here
                if world.is_main and (mistaken or not (began or lost)) and not folder.is_used:
                    _undo(folder, there, own=run_dir is None)
                raise


def resume_run(
    run_dir: str | Path, overrides: Sequence[str] = (), *, progress: bool = True, import_class: bool = False
) -> RunOutcome:
    """Continue a run from its newest intact checkpoint, or from the start if it has none yet.

    A run made in Python is made again from what its config.yaml records: `import_class` allows to import and run the
    code named there. Raises RunFolderError if the run is finished and the overrides do not make it longer.
    """
    with before_joining():
        folder = RunFolder.open(run_dir)
        if (python := python_run(folder, overrides, import_class)) is None:
            config = load_config(folder.config_path, overrides=overrides, announce=True)
    if python is not None:
        return _resume_python(python, overrides, progress)
    before = folder.checkpoints_path
    folder.place_checkpoints(config.training.checkpoint_dir)
    with joined_world(config.training.device) as world:
        _check_same(world, config)
        _partly_resumed(world, folder.path, resumes=True)
        return _continue(config, folder, world, overrides, before=before, progress=progress)


def _partly_resumed(world: World, run_dir: str | Path | None, *, resumes: bool) -> RunFolder | None:
    """Return the folder of a run that some processes resume while others train it; None if all do the same.

    A script that resumes a run if there is one does so on a machine that was lost and comes again, while the launchers
    of the other machines start `train` again. Raises ConfigError if it is not the same run.
    """
    if world.host_max([int(resumes), int(not resumes)]) != [1, 1]:
        return None
    path = None if run_dir is None else str(Path(run_dir).resolve())
    check_same(
        world, {"the run folder": path}, "some of them resume a run, so all must do so, or train in its folder"
    )
    assert path is not None
    return Launch.of(world).note(RunFolder(path))


def _continue(
    config: ExperimentConfig,
    folder: RunFolder,
    world: World,
    overrides: Sequence[str] = (),
    *,
    before: Path | None = None,
    progress: bool = True,
) -> RunOutcome:
    """Continue a run in its folder; `before` is where its checkpoints were, if that may have changed."""
    with _held(folder, world):
        world.attempt(lambda: _take_checkpoints(folder, before or folder.checkpoints_path), here=world.is_main)
        trainer = build_trainer(config, folder=folder, world=world, progress=progress)
        found = world.attempt(lambda: _newest_checkpoint(folder), here=world.is_main)
        if path := world.share_text(str(found or "")):
            changed = any(override.lstrip().startswith("optimizer") for override in overrides)
            changed = changed or _has_other(["optimizer"], Path(path), config)
            trainer.load_checkpoint(path, keep_hyperparameters=changed)
            if world.is_main and _has_other(["validation_loss", "loss"], Path(path), config):
                logger.warning(
                    "the loss is another one than that of the checkpoint: the best val_loss, and callbacks that wait "
                    "for a better one, compare its values with those of the earlier one"
                )
        # a process may also be lost when the run has finished; launchers of different machines count by themselves
        if not world.host_max([int(is_restart())])[0]:
            _refuse_finished(trainer, folder, overrides)
        with _config_undone(trainer, folder) if overrides else contextlib.nullcontext():
            return _run(trainer, folder)


@contextlib.contextmanager
def _config_undone(trainer: Trainer, folder: RunFolder) -> Iterator[None]:
    """Give the run its config back if overrides are mistaken: if it fails because of them before it has made a step.

    Otherwise every later resume would fail as well, until somebody finds the values that were there before.
    """
    is_main, step = trainer.machine.world.is_main, trainer.state.clock.step
    before = folder.config_path.read_bytes() if is_main else b""
    try:
        yield
    except (ConfigError, DataError, TrainingError) as error:
        if trainer.state.clock.step == step:
            if is_main:
                write_bytes(folder.config_path, before)
            error.add_note("config.yaml is as it was before this command")
        raise


def _has_other(sections: Sequence[str], checkpoint: Path, config: ExperimentConfig) -> bool:
    """Whether the first of these sections that is given has other settings in the config of a checkpoint.

    A resume may not have saved since they were changed. Settings that only one of the two has are those of another
    version.
    """
    path = checkpoint / CONFIG
    if not path.is_file():
        return False
    saved, own = (
        flat(next((one[name] for name in sections if one.get(name)), None))
        for one in (read_config(path).data, config.to_dict())
    )
    return any(saved[key] != own[key] for key in saved.keys() & own.keys())


def _check_same(world: World, config: ExperimentConfig) -> None:
    """Refuse processes that have different configs or commits: files of other machines may be of another day."""
    if world.size > 1:
        facts = {**flat(config.to_dict()), "the git commit": commit()}
        check_same(world, facts, "start all processes with the same command, config and code")


def _resume_python(run: PythonRun, overrides: Sequence[str], progress: bool) -> RunOutcome:
    with joined_world(run.device) as world:
        if not find_checkpoints(run.folder.checkpoints_path):  # the first weights were made by the script
            raise RunFolderError(f"{run.folder.path} has no checkpoint yet; start its script again")
        trainer = run.trainer(world, progress)
        _refuse_finished(trainer, run.folder, overrides, " --import-class")
        outcome = _run(trainer, run.folder)
        outcome.resume_command += " --import-class"
        return outcome


def _refuse_finished(trainer: Trainer, folder: RunFolder, overrides: Sequence[str], switch: str = "") -> None:
    clock, epochs, max_steps = trainer.state.clock, trainer.config.num_epochs, trainer.config.max_steps
    if not overrides:
        is_over = clock.step >= folder.read_result().get("step", 0)
    else:  # not by the number of steps: with a larger batch the epochs before would have had fewer
        is_over = (epochs is not None and clock.epoch >= epochs) or (
            max_steps is not None and clock.step >= max_steps
        )
    if folder.is_finished and is_over:
        raise RunFolderError(
            f"run {folder.path} is finished ({clock.epoch} epochs, {clock.step} steps); to train longer, use "
            f"`etude resume {quote(str(folder.path))} training.epochs={clock.epoch + 5}{switch}`"
        )


def _run(trainer: Trainer, folder: RunFolder) -> RunOutcome:
    metrics = trainer.train()
    clock, reason = trainer.state.clock, trainer.callbacks.control.reason
    interrupted = bool(metrics.pop("interrupted", 0.0))
    outcome = RunOutcome(folder.path, "interrupted" if interrupted else "finished", clock.step, clock.epoch)
    outcome.reason, outcome.is_main = reason, trainer.machine.world.is_main
    outcome.resume_command = _resume_command(folder, trainer.machine.world)
    outcome.metrics, outcome.best = metrics, trainer.output.judge.best
    if outcome.is_main and not interrupted and folder.samples_path.exists():
        outcome.samples = _samples(trainer, folder)
    return outcome


def _samples(trainer: Trainer, folder: RunFolder) -> str:
    """Return the texts that a run has sampled; empty if the file belongs to something else."""
    # imported here: it loads models and tokenizers that other runs do not need
    from etude.callbacks import TextSamples

    sampled = any(isinstance(one, TextSamples) for one in trainer.callbacks)
    return folder.samples_path.read_text(encoding="utf-8") if sampled else ""


def _new_folder(config: ExperimentConfig, run_dir: str | Path | None, overwrite: bool) -> RunFolder:
    path = run_dir if run_dir is not None else default_run_dir(config.name)
    return RunFolder.create(path, overwrite=overwrite, checkpoint_dir=config.training.checkpoint_dir)


def _take_checkpoints(folder: RunFolder, before: Path) -> None:
    """Check that the checkpoints are where the config says, and belong to no other run."""
    if not find_checkpoints(folder.checkpoints_path) and find_checkpoints(before):
        raise RunFolderError(
            f"{folder.checkpoints_path} holds no checkpoint, those of the run are in {before}; move them to "
            "continue with another training.checkpoint_dir"
        )
    folder.claim_checkpoints(new=False)


def _made_by_main(world: World, make: Callable[[], RunFolder]) -> RunFolder:
    """Create the folder on one process and broadcast its path or the error."""
    folder = world.attempt(make, here=world.is_main)
    return RunFolder(world.share_text("" if folder is None else str(folder.path)))


@contextlib.contextmanager
def _held(folder: RunFolder, world: World) -> Iterator[None]:
    """Hold the folder's lock on the process that writes; if it is already held, all processes fail."""
    with contextlib.ExitStack() as stack:
        world.attempt(lambda: stack.enter_context(folder.lock()), here=world.is_main)
        try:
            yield
        except KeyboardInterrupt as stop:
            stop.add_note(f"earlier checkpoints are intact; continue with: {_resume_command(folder, world)}")
            raise


def _resume_command(folder: RunFolder, world: World) -> str:
    prefix = _folder_of_command() if world.size == 1 else ""
    return launched_command(world, f"{prefix}etude resume {quote(str(folder.path))}")


def _folder_of_command() -> str:
    """Return the prefix with which a shell finds `etude`, for example in an inactive virtual environment."""
    command = Path(sys.argv[0])
    if command.name != "etude" or command.parent == Path() or shutil.which("etude"):
        return ""
    return f"{quote(str(command.parent))}/"


def _undo(folder: RunFolder, there: Collection[str], *, own: bool) -> None:
    """Undo the start of a run that failed before it recorded a step.

    The same command then works once the mistake is fixed, and nothing looks like a resumable run. Files that were
    `there` before stay. With `own` the folder itself was created for this run.
    """
    written = (folder.config_path, folder.environment_path, folder.diff_path, folder.events_path, folder.launch_path)
    for path in (*written, folder.status_path, folder.metrics_path, folder.media_path):
        if path.name not in there or path == folder.launch_path:
            path.unlink(missing_ok=True)
    files = [path for path in folder.path.rglob("*") if not path.is_dir()]
    if own and set(files) <= {folder.lock_path}:
        shutil.rmtree(folder.path, ignore_errors=True)


def _newest_checkpoint(folder: RunFolder) -> Path | None:
    manager = CheckpointManager(folder.checkpoints_path)
    if not manager.all():
        logger.warning("%s has no checkpoint yet: starting from the beginning", folder.path)
        return None
    path, warnings = newest_intact(folder.checkpoints_path)
    for warning in warnings:
        logger.warning("%s; continuing from %s", warning, path.name)
    return path
