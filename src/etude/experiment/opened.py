"""A run whose weights are used: a checkpoint with the model and data of its config, and its evaluation."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from etude.checkpoint import Checkpoint, load_model_state, read_checkpoint
from etude.checkpoint.trust import errors_of
from etude.core import ConfigError, DataError, RunFolderError
from etude.core.spelling import suggest
from etude.data.splits import OtherData
from etude.distributed import World, before_joining, join_world, leave_world
from etude.distributed.settings import ParallelConfig
from etude.distributed.world import failing_together
from etude.experiment.build import Data, build_data, build_trainer, recorded_data
from etude.experiment.config import ExperimentConfig, load_config
from etude.experiment.load import read_weights
from etude.experiment.python_run import ONLY_TRAINING, PythonRun, python_run
from etude.monitor import RunFolder
from etude.trainer import Trainer, TrainerConfig, resolve_device

logger = logging.getLogger("etude")


class Evaluated(NamedTuple):
    """The result of an evaluation."""

    path: Path
    """The checkpoint."""
    metrics: dict[str, float]
    files: list[Path]
    """Files of metrics, such as a confusion matrix, on the process that writes."""
    split: str
    """The split, unless it was another file."""


def evaluate_run(
    run_dir: str | Path,
    *,
    split: str | None = None,
    which: str | int = "best",
    data: str | Path | None = None,
    overrides: Sequence[str] = (),
    import_class: bool = False,
) -> Evaluated:
    """Evaluate a checkpoint of a run (`best`, `last` or a step number).

    It is evaluated on a split of the run's data (`test`; `validation` for a run made in Python), or on another file,
    `data`, which is prepared as in training. Files of metrics, such as a confusion matrix, are written into
    `metrics/SPLIT` of the run folder, or `metrics/data-NAME`. `import_class` is that of `resume_run`.
    """
    with before_joining():
        python = python_run(RunFolder.open(run_dir), overrides, import_class) if data is None else None
    if python is not None:
        return _evaluate_python(python, split or "validation", which)
    split = split or "test"
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
        return Evaluated(run.checkpoint.path, metrics, written, split)


def _evaluate_python(run: PythonRun, split: str, which: str | int) -> Evaluated:
    with joined_world(run.device) as world:
        found = world.attempt(lambda: read_weights(run.folder, which), here=world.is_main)
        path = Path(world.share_text("" if found is None else str(found.path)))
        trainer = run.evaluator(split, found if found is not None else read_checkpoint(path), world)
        metrics, files = trainer.evaluate(), trainer.val_task.files()
        written = _written(run.folder.path, split, files) if world.is_main else []
        return Evaluated(path, metrics, written, split)


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
        trainer = build_trainer(_not_trained(self.config, self.world), data=data, world=self.world, progress=False)
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


def _not_trained(config: ExperimentConfig, world: World) -> ExperimentConfig:
    """Return a config without what only training uses, of which warnings would be irrelevant.

    A single process has the whole model, however many of them divided it in training.
    """
    training: TrainerConfig = config.sections["training"]
    defaults = {name: type(training).model_fields[name].default for name in ONLY_TRAINING}
    training = training.model_copy(update={**defaults, "save_checkpoints": False})
    sections = {**config.sections, "scheduler": None, "training": training}
    if world.size == 1:
        sections["parallel"] = ParallelConfig()
    return replace(config, sections=sections)


@contextlib.contextmanager
def opened_run(run_dir: str | Path, which: str | int, overrides: Sequence[str] = ()) -> Iterator[OpenedRun]:
    """Open a run of a config and read a checkpoint, the same on every process."""
    with before_joining():
        folder = RunFolder.open(run_dir)
        folder.check_rebuildable()
        config = load_config(folder.config_path, overrides=overrides, announce=True)
    with joined_world(config.training.device) as world:
        found = world.attempt(lambda: read_weights(folder, which), here=world.is_main)
        path = Path(world.share_text("" if found is None else str(found.path)))
        yield OpenedRun(config, found if found is not None else read_checkpoint(path), world)


@contextlib.contextmanager
def joined_world(name: str) -> Iterator[World]:
    """Join the processes of a run, on the device of this name, and leave them."""
    with before_joining():
        device = resolve_device(name)
    world = join_world(device.type)
    try:
        with failing_together(world):
            yield world
    finally:
        leave_world()
