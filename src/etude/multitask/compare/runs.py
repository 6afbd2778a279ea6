"""The runs of a comparison, trained and evaluated by a runner that is passed in, and the files of its tables."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from etude.core import ConfigError
from etude.core.files import write_text
from etude.data import DataSplits, Streams
from etude.distributed import before_joining
from etude.monitor import RunFolder
from etude.multitask.compare.alone import stream_of
from etude.multitask.compare.tables import ComparedRun, Comparison, WeightingComparison

Numbers = dict[str, dict[str, float]]
"""Split → numbers."""


class Runner(Protocol):
    """What comparisons need of whole experiments: an `etude.experiment.ExperimentRunner`."""

    def load(self, experiment: str | Path, overrides: Sequence[str] = ()) -> Any:
        """Return the config of an experiment."""

    def data(self, config: Any) -> Any:
        """Return its data: `splits`, and `loader(split)`."""

    def train(self, config: Any, path: Path, *, progress: bool) -> RunFolder:
        """Return the folder of the finished run: train it, go on with it, or find it there."""

    def evaluate(self, config: Any, folder: RunFolder, data: Any) -> dict[str, Any]:
        """Return `step`, `parameters` and `splits` (split → numbers) of its last checkpoint."""


def ready(runner: Runner, config: Any) -> Any:
    """Return the data of an experiment to be compared; raise ConfigError if its models could not be evaluated."""
    with before_joining():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "a comparison trains its models one after the other in one process; start it without torchrun"
            )
    if not config.training.save_checkpoints:
        raise ConfigError(
            f"{config.document.place('training.save_checkpoints')}: a comparison evaluates the last checkpoint of "
            f"every model; set it to true"
        )
    data = runner.data(config)
    _check_splits(config, data.splits)
    return data


def chosen_seeds(config: Any, seeds: Sequence[int] | int | None) -> tuple[int, ...]:
    """Return the seeds: those given, so many from that of the config on, or that one alone."""
    first = config.training.seed
    return tuple(range(first, first + (seeds or 1))) if not isinstance(seeds, Sequence) else tuple(seeds)


def with_training(config: Any, **changes: Any) -> Any:
    """Return the experiment with other settings of training."""
    training = config.sections["training"].model_copy(update=changes)
    return replace(config, sections={**config.sections, "training": training})


def train_and_measure(
    runner: Runner, name: str, config: Any, data: Any, root: Path, *, progress: bool
) -> tuple[Numbers, ComparedRun]:
    """Train a run in `seed-<seed>/<name>` and evaluate its last checkpoint, every task in its main variant."""
    seed = config.training.seed
    folder = runner.train(config, root / f"seed-{seed}" / name, progress=progress)
    found = runner.evaluate(replace(config, sections={**config.sections, "curriculum": None}), folder, data)
    samples = folder.read_result()["samples"]
    return found["splits"], ComparedRun(name, seed, str(folder.path), found["step"], samples, found["parameters"])


def write_tables(root: Path, comparison: Comparison | WeightingComparison) -> None:
    """Write `compare.json` and `compare.md`."""
    write_text(root / "compare.json", json.dumps(comparison.to_dict(), indent=2) + "\n")
    write_text(root / "compare.md", comparison.to_markdown())


def _check_splits(config: Any, splits: DataSplits) -> None:
    """Raise ConfigError if a task has nothing that it can be compared on."""
    for name, section in config.tasks.items():
        stream = stream_of(name, section)
        held_out = [part for part in (splits.validation, splits.test) if part is not None]
        if not any(stream is None or not isinstance(part, Streams) or stream in part.parts for part in held_out):
            raise ConfigError(
                f"{config.document.place(f'tasks.{name}')}: its data has neither a validation nor a test part, so "
                f"there is nothing to compare models on"
            )
