"""The runs of a comparison, trained and evaluated by a given runner; several weightings over seeds."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.config import lookup
from etude.core import ConfigError
from etude.core.files import write_text
from etude.data import Streams
from etude.distributed import before_joining
from etude.multitask.compare.tables import (
    ComparedNumber,
    ComparedRun,
    Comparison,
    Measured,
    make_rows,
    note_on_chance,
)
from etude.multitask.sections import variants_of

Tell = Callable[[str], None]
"""Receives progress messages of a comparison."""


class ComparedRuns:
    """Trains the runs of a comparison, each in `seed-<seed>/<name>`, and collects their results.

    `runner` loads, trains and evaluates whole experiments: an `etude.experiment.ExperimentRunner`.
    """

    def __init__(self, runner: Any, config: Any, root: Path, progress: bool, tell: Tell) -> None:
        """Load the data of an experiment; raise ConfigError if its models could not be evaluated."""
        with before_joining():
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError("a comparison trains one model after the other; start it without torchrun")
        if not config.training.save_checkpoints:
            raise ConfigError(
                f"{config.document.place('training.save_checkpoints')}: a comparison evaluates the last checkpoint of "
                f"every model; set it to true"
            )
        self.runner, self.root, self.progress, self.tell = runner, root, progress, tell
        self.experiment: str = config.name
        self.data = runner.data(config)
        self._check_splits(config)
        self.runs: list[ComparedRun] = []
        self.found: dict[str, list[Measured]] = {}
        """Metrics by the name of the run, for each seed."""

    def add(self, name: str, config: Any, data: Any, message: str) -> ComparedRun:
        """Train a run and evaluate its last checkpoint, every task in its main variant."""
        seed = config.training.seed
        self.tell(f"seed {seed}: {message}")
        folder = self.runner.train(config, self.root / f"seed-{seed}" / name, progress=self.progress)
        found = self.runner.evaluate(replace(config, sections={**config.sections, "curriculum": None}), folder, data)
        samples = folder.read_result()["samples"]
        self.runs.append(ComparedRun(name, seed, str(folder.path), found["step"], samples, found["parameters"]))
        self.found.setdefault(name, []).append(found["splits"])
        return self.runs[-1]

    def write(self, settings: Mapping[str, Any], rows: Iterable[ComparedNumber], *notes: str) -> Comparison:
        """Return the comparison; write it to `compare.json` and `compare.md`."""
        seeds = tuple(dict.fromkeys(run.seed for run in self.runs))
        runs, notes = tuple(self.runs), (*notes, note_on_chance(seeds))
        comparison = Comparison(self.experiment, settings, seeds, runs, tuple(rows), notes)
        write_text(self.root / "compare.json", json.dumps(comparison.to_dict(), indent=2) + "\n")
        write_text(self.root / "compare.md", comparison.to_markdown())
        return comparison

    def _check_splits(self, config: Any) -> None:
        """Raise ConfigError if a task cannot be compared."""
        splits = self.data.splits
        held_out = [part for part in (splits.validation, splits.test) if part is not None]
        for name, section in config.tasks.items():
            stream = next(variants_of(name, section)).stream
            if not any(stream is None or not isinstance(part, Streams) or stream in part.parts for part in held_out):
                raise ConfigError(
                    f"{config.document.place(f'tasks.{name}')}: its data has neither a validation nor a test split; "
                    "add one to compare models"
                )


def folder_of(config: Any, out: str | Path | None, name: str) -> Path:
    """Return the folder of a comparison: `out`, or the default one among the runs of the experiment."""
    return Path(out) if out is not None else Path("runs") / config.name / name


def chosen_seeds(config: Any, seeds: Sequence[int] | int | None) -> tuple[int, ...]:
    """Return the seeds: those given, or the given number of seeds starting at that of the config, by default one."""
    first = config.training.seed
    return tuple(range(first, first + (seeds or 1))) if not isinstance(seeds, Sequence) else tuple(seeds)


def with_training(config: Any, **changes: Any) -> Any:
    """Return the experiment with other training settings."""
    training = config.sections["training"].model_copy(update=changes)
    return replace(config, sections={**config.sections, "training": training})


def compare_weightings(
    runner: Any,
    experiment: str | Path,
    weightings: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | int | None = None,
    progress: bool = True,
    tell: Tell = lambda _words: None,
) -> Comparison:
    """Train the experiment with every weighting and seed, evaluate all runs and write `compare.json` and `compare.md`.

    A weighting is a name; that of the experiment keeps its settings, others have their defaults. Every run has a
    folder `seed-<seed>/<weighting>` in `out` (`runs/<experiment>/compare-weightings` by default). Finished runs are
    not repeated, and an interrupted one is continued. Raises ConfigError, before anything is trained, for an unknown
    or invalid weighting, and for the reasons of `compare_tasks`.
    """
    own = runner.load(experiment, overrides)
    if not own.tasks:
        raise ConfigError(f"{own.document.place('tasks')}: there are no tasks; add at least two")
    if len(set(weightings)) < len(weightings) or not weightings:
        raise ConfigError(
            f"weightings {', '.join(weightings) or '(none)'}: list each once, such as static,uncertainty"
        )
    for name in weightings:
        lookup("weighting", name)
    selected = own.selection("weighting")
    configs = {
        name: own
        if selected is not None and selected.component.name == name
        else runner.load(experiment, [*overrides, f"weighting={name}"])
        for name in weightings
    }
    runs = ComparedRuns(runner, own, folder_of(own, out, "compare-weightings"), progress, tell)
    for seed in chosen_seeds(own, seeds):
        for name, config in configs.items():
            runs.add(name, with_training(config, seed=seed), runs.data, name)
    rows = [row for task in own.tasks for row in make_rows(task, runs.found)]
    return runs.write({"weightings": tuple(configs)}, rows, "every model after its last step")
