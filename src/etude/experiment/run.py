"""Whole runs in a run folder: start one, resume one, evaluate one."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from etude.checkpoint import (
    Checkpoint,
    CheckpointManager,
    find_checkpoints,
    load_model_state,
    newest_intact,
    read_checkpoint,
)
from etude.checkpoint.trust import errors_of
from etude.core import ConfigError, DataError, RunFolderError
from etude.core.monitor import Best
from etude.core.spelling import suggest
from etude.data.splits import OtherData
from etude.distributed import World, before_joining, join_world, launcher, leave_world
from etude.distributed.world import failing_together
from etude.experiment.build import Data, build_data, build_trainer, recorded_data
from etude.experiment.config import ExperimentConfig, load_config, load_experiment_config
from etude.experiment.load import read_weights
from etude.monitor import RunFolder, default_run_dir
from etude.trainer import Trainer, resolve_device

logger = logging.getLogger("etude")

_ONLY_TRAINING = (
    *("warmup_steps", "scheduler_type", "use_scheduler"),
    *("validate_interval", "validate_every_steps", "keep_best", "restore_best", "monitor", "mode"),
)
"""Settings that have no effect on a model that is evaluated."""


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


class Evaluated(NamedTuple):
    """The result of an evaluation."""

    path: Path
    """The checkpoint."""
    metrics: dict[str, float]
    files: list[Path]
    """Files of metrics, such as a confusion matrix, on the process that writes."""


def train_experiment(
    experiment: str | Path | ExperimentConfig,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> RunOutcome:
    """Train an experiment in a new run folder and return the outcome."""
    with before_joining():
        config = (
            experiment
            if isinstance(experiment, ExperimentConfig)
            else load_experiment_config(experiment, overrides=overrides)
        )
    with _world(config) as world:
        folder = _made_by_main(world, lambda: _new_folder(config, run_dir, overwrite))
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
                if world.is_main and (mistaken or not began) and not folder.is_used:
                    _undo(folder, there, own=run_dir is None)
                raise


def resume_run(run_dir: str | Path, overrides: Sequence[str] = (), *, progress: bool = True) -> RunOutcome:
    """Continue a run from its newest intact checkpoint, or from the start if it has none yet.

    Raises RunFolderError if the run is finished and the overrides do not make it longer.
    """
    with before_joining():
        folder = RunFolder.open(run_dir)
        folder.check_rebuildable()
        config = load_config(folder.config_path, overrides=overrides, announce=True)
    before = folder.checkpoints_path
    folder.place_checkpoints(config.training.checkpoint_dir)
    with _world(config) as world, _held(folder, world):
        world.attempt(lambda: _take_checkpoints(folder, before), here=world.is_main)
        trainer = build_trainer(config, folder=folder, world=world, progress=progress)
        found = world.attempt(lambda: _newest_checkpoint(folder), here=world.is_main)
        if path := world.share_text(str(found or "")):
            changed = any(override.lstrip().startswith("optimizer") for override in overrides)
            trainer.load_checkpoint(path, keep_hyperparameters=changed)
        clock = trainer.state.clock
        end = folder.read_result().get("step", 0) if not overrides else trainer.total_steps
        if folder.is_finished and (end is None or clock.step >= end):
            raise RunFolderError(
                f"run {folder.path} is finished ({clock.epoch} epochs, {clock.step} steps); to train longer, use "
                f"`etude resume {quote(str(folder.path))} training.epochs={clock.epoch + 5}`"
            )
        return _run(trainer, folder)


def evaluate_run(
    run_dir: str | Path,
    *,
    split: str = "test",
    which: str | int = "best",
    data: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Evaluated:
    """Evaluate a checkpoint of a run (`best`, `last` or a step number).

    It is evaluated on a split of the run's data, or on another file, `data`, which is prepared as in training. Files of
    metrics, such as a confusion matrix, are written into `metrics/SPLIT` of the run folder, or `metrics/data-NAME`.
    """
    with opened_run(run_dir, which, overrides) as run:
        loader: Any
        if data is not None:
            trainer, other = run.with_file(data, labelled=True)
            loader, name = other.part, f"data-{Path(data).stem}"
        else:
            splits = build_data(run.config, run.world)
            if (loader := splits.loader(split)) is None:
                raise ConfigError(f"the data of this run has no split {split!r}{suggest(split, splits.names)}")
            trainer, name = run.trainer(splits), split
        metrics, files = trainer.evaluate(loader), trainer.task.files()
        written = _written(run_dir, name, files) if run.world.is_main else []
        return Evaluated(run.checkpoint.path, metrics, written)


def _written(run_dir: str | Path, name: str, files: Mapping[str, str]) -> list[Path]:
    """Write files of metrics and return their paths; a folder that cannot be written is a warning."""
    try:
        return RunFolder(run_dir).write_files(files, name)
    except RunFolderError as error:
        logger.warning("%s cannot be written: %s", Path(run_dir) / "metrics" / name, error.__cause__)
        return []


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run whose weights are used."""

    config: ExperimentConfig
    checkpoint: Checkpoint
    world: World

    def trainer(self, data: Data) -> Trainer:
        """Return a trainer with the weights of the checkpoint, which writes nothing."""
        trainer = build_trainer(_not_trained(self.config), data=data, world=self.world, progress=False)
        with errors_of(self.checkpoint.path):
            trainer.check_facts(self.checkpoint.meta, self.checkpoint.path)
            for feature in data.features:
                feature.evaluating(trainer, self.checkpoint)
            load_model_state(trainer.model, self.checkpoint.model_state)
        return trainer

    def with_file(self, path: str | Path, *, labelled: bool) -> tuple[Trainer, OtherData]:
        """Return a trainer, and a file prepared as in training; the data of the training is not needed."""
        selection = self.config.require("data")
        if (prepare := selection.component.prepare) is None:
            raise ConfigError(
                f"{self.config.document.place('data')}: the data set '{selection.component.name}' cannot prepare "
                "another file; use a split of the run, or register the data set with prepare="
            )
        with errors_of(self.checkpoint.path, "meta"):
            data = recorded_data(self.config, self.checkpoint.meta, self.world)
        trainer = self.trainer(data)
        arguments = {**selection.defaults, **selection.arguments}
        file = Path(path).expanduser()
        try:
            other: OtherData = prepare(file, data.splits.facts, arguments, labelled)
        except (LookupError, TypeError, AttributeError) as error:  # the facts may be of another version, or damaged
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{file} cannot be prepared by the facts of {self.checkpoint.path} ({reason})") from error
        return trainer, replace(other, part=data.loader_over(other.part))


def _not_trained(config: ExperimentConfig) -> ExperimentConfig:
    """Return a config without what only training uses, of which warnings would be irrelevant."""
    training = config.training
    defaults = {name: type(training).model_fields[name].default for name in _ONLY_TRAINING}
    training = training.model_copy(update={**defaults, "save_checkpoints": False})
    return replace(config, sections={**config.sections, "scheduler": None, "training": training})


@contextlib.contextmanager
def opened_run(run_dir: str | Path, which: str | int, overrides: Sequence[str] = ()) -> Iterator[OpenedRun]:
    """Open a run of a config and read a checkpoint, the same on every process."""
    with before_joining():
        folder = RunFolder.open(run_dir)
        folder.check_rebuildable()
        config = load_config(folder.config_path, overrides=overrides, announce=True)
    with _world(config) as world:
        found = world.attempt(lambda: read_weights(folder, which), here=world.is_main)
        path = Path(world.share_text("" if found is None else str(found.path)))
        yield OpenedRun(config, found if found is not None else read_checkpoint(path), world)


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


@contextlib.contextmanager
def _world(config: ExperimentConfig) -> Iterator[World]:
    with before_joining():
        device = resolve_device(config.training.device)
    world = join_world(device.type)
    try:
        with failing_together(world):
            yield world
    finally:
        leave_world()


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
    return f"{launcher(world) or _folder_of_command()}etude resume {quote(str(folder.path))}"


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
    written = (folder.config_path, folder.environment_path, folder.diff_path, folder.events_path)
    for path in (*written, folder.status_path, folder.metrics_path, folder.media_path):
        if path.name not in there:
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
