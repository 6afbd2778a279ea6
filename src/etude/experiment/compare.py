"""One model for all tasks against one model for each, of the same size and for the same budget."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.checkpoint import CheckpointManager, load_model_state
from etude.config import Document, Selection
from etude.core import ConfigError, RunFolderError
from etude.core.files import write_text
from etude.core.spelling import suggest
from etude.data import DataLoader, DataSplits
from etude.data.parts import Streams
from etude.distributed import World, before_joining
from etude.engine.step import GradientAccumulator
from etude.experiment.build import Data, build_data, build_trainer
from etude.experiment.comparison import ComparedRun, Comparison, WeightingComparison, make_rows
from etude.experiment.config import ExperimentConfig, load_config, load_experiment_config, validate_experiment
from etude.experiment.run import resume_run, train_experiment
from etude.monitor import RunFolder

BUDGETS = ("share", "whole")
Numbers = dict[str, dict[str, float]]
"""Split → numbers."""

MULTI = "multi-task"


def compare_tasks(
    experiment: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    budget: str = "share",
    seeds: Sequence[int] | int | None = None,
    progress: bool = True,
    tell: Callable[[str], None] = lambda _words: None,
) -> Comparison:
    """Train the experiment and one model per task, evaluate them all and write `compare.json` and `compare.md`.

    A single-task model has the same trunk, the head of the task without variants, and its stream; optimizer, schedule
    and batch size are the same, and there is no curriculum, no weighting and no callback. `budget`: "share" gives it as
    many samples as the multi-task run read for its task, rounded up to a whole step, "whole" as many steps as the whole
    multi-task run. Warm-up is shortened with the run. All models are compared after their last step, on the test split
    where there is one, else on validation. Runs that are finished in `out` (`runs/<experiment>/compare` by default) are
    not trained again, one that was stopped goes on. Raises ConfigError if there is nothing to compare, or no checkpoint
    to evaluate.
    """
    if budget not in BUDGETS:
        raise ConfigError(f"budget '{budget}' is not known{suggest(budget, BUDGETS)}")
    config = load_experiment_config(experiment, overrides=overrides)
    if len(config.tasks or {}) < 2:
        raise ConfigError(
            f"{config.document.place('tasks')}: there must be two tasks or more to compare a model of all with models "
            f"of each, found {len(config.tasks or {})}"
        )
    data = ready(config)
    root = Path(out) if out is not None else Path("runs") / config.name / "compare"
    chosen = chosen_seeds(config, seeds)
    runs: list[ComparedRun] = []
    multi: list[Numbers] = []
    single: dict[str, list[Numbers]] = {task: [] for task in config.tasks}
    for seed in chosen:
        tell(f"seed {seed}: one model for {', '.join(config.tasks)}")
        whole = with_training(config, seed=seed)
        folder = trained(whole, root / f"seed-{seed}" / MULTI, progress)
        result = folder.read_result()
        numbers, run = measured(MULTI, whole, folder, data)
        multi.append(numbers)
        runs.append(run)
        for task in config.tasks:
            alone = single_task_config(whole, task, data)
            own = build_data(alone, World())
            steps = result["step"] if budget == "whole" else steps_for(own, result["samples"][task])
            tell(f"seed {seed}: a model for {task} alone, {steps} steps")
            alone = _for_steps(alone, steps, of_steps=result["step"])
            folder = trained(alone, root / f"seed-{seed}" / task, progress)
            numbers, run = measured(task, alone, folder, own)
            single[task].append(numbers)
            runs.append(run)
    rows = make_rows(list(config.tasks), multi, single)
    comparison = Comparison(config.name, budget, chosen, tuple(runs), rows)
    write_tables(root, comparison)
    return comparison


def ready(config: ExperimentConfig) -> Data:
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
    data = build_data(config, World())
    _check_splits(config, data.splits)
    return data


def chosen_seeds(config: ExperimentConfig, seeds: Sequence[int] | int | None) -> tuple[int, ...]:
    """Return the seeds: those given, so many from that of the config on, or that one alone."""
    first = config.training.seed
    return tuple(range(first, first + (seeds or 1))) if not isinstance(seeds, Sequence) else tuple(seeds)


def write_tables(root: Path, comparison: Comparison | WeightingComparison) -> None:
    """Write `compare.json` and `compare.md`."""
    write_text(root / "compare.json", json.dumps(comparison.to_dict(), indent=2) + "\n")
    write_text(root / "compare.md", comparison.to_markdown())


def single_task_config(config: ExperimentConfig, task: str, data: Data) -> ExperimentConfig:
    """Return the experiment with one task alone, in its main variant."""
    name = f"{config.name}: {task} alone"
    alone = _tasks_room().sections_of_one(config.sections, task, data.splits)
    return replace(config, name=name, sections={**alone, "name": name})


def steps_for(data: Data, samples: int) -> int:
    """Return the fewest optimizer steps that read so many samples of the training data or more.

    An epoch may end with a smaller batch, and with a step of fewer micro-batches.
    """
    loader = data.loader("train")
    assert loader is not None
    accumulator = GradientAccumulator(accumulation_steps=data.config.grad_accum_steps)
    whole = loader.sampler.epoch_samples if isinstance(loader, DataLoader) else len(loader) * loader.batch_size
    steps = epoch = 0
    while samples > whole:
        steps += accumulator.num_steps(len(loader), range(epoch, epoch + 1))
        samples -= whole
        epoch += 1
    return max(1, steps - (-samples // (loader.batch_size * accumulator.steps_at(epoch))))


def _for_steps(config: ExperimentConfig, steps: int, *, of_steps: int) -> ExperimentConfig:
    """Return the experiment for so many steps instead of `of_steps`."""
    scheduler = config.selection("scheduler")
    short = None if scheduler is None else _shortened(scheduler, steps / of_steps)
    return with_training(
        replace(config, sections={**config.sections, "scheduler": short}),
        epochs=None,
        max_steps=steps,
        validate_interval=0,
        validate_every_steps=None,
        checkpoint_interval=0,
    )


def _shortened(scheduler: Selection, share: float) -> Selection:
    """Return the schedule with its warm-up shortened like the run."""
    said = (scheduler.defaults | scheduler.arguments).get("warmup_steps")
    if not isinstance(said, int) or share >= 1:
        return scheduler
    return replace(
        scheduler, arguments={**scheduler.arguments, "warmup_steps": min(said, max(1, round(said * share)))}
    )


def _tasks_room() -> Any:
    """Return the module that knows what a task is; a config with tasks has been read, so it is there."""
    return import_module("etude.multitask.alone")


def with_training(config: ExperimentConfig, **changes: Any) -> ExperimentConfig:
    """Return the experiment with other settings of training."""
    training = config.sections["training"].model_copy(update=changes)
    return replace(config, sections={**config.sections, "training": training})


def _check_splits(config: ExperimentConfig, splits: DataSplits) -> None:
    """Raise ConfigError if a task has nothing that it can be compared on."""
    for name, section in config.tasks.items():
        stream = _tasks_room().stream_of(name, section)
        held_out = [part for part in (splits.validation, splits.test) if part is not None]
        if not any(stream is None or not isinstance(part, Streams) or stream in part.parts for part in held_out):
            raise ConfigError(
                f"{config.document.place(f'tasks.{name}')}: its data has neither a validation nor a test part, so "
                f"there is nothing to compare models on"
            )


def trained(config: ExperimentConfig, path: Path, progress: bool) -> RunFolder:
    """Return the folder of a finished run: train it, go on with it, or find it there."""
    folder = RunFolder(path)
    folder.place_checkpoints(config.training.checkpoint_dir)
    if not folder.holds_run:
        outcome = train_experiment(config, run_dir=path, progress=progress)
    else:
        as_written = validate_experiment(Document(config.to_dict()))
        if load_config(folder.config_path, announce=True).to_dict() != as_written.to_dict():
            raise RunFolderError(f"{path} holds a run of another configuration; choose another --out, or remove it")
        if folder.is_finished:
            return folder
        outcome = resume_run(path, progress=progress)
    if outcome.status != "finished":
        stop = KeyboardInterrupt()
        stop.add_note("what was trained is kept; run the same command again to go on")
        raise stop
    return folder


def measured(name: str, config: ExperimentConfig, folder: RunFolder, data: Data) -> tuple[Numbers, ComparedRun]:
    """Return the numbers of a run's last checkpoint on validation and test, every task in its main variant."""
    result, path = folder.read_result(), folder.path / "evaluation.json"
    saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if saved.get("step") != result["step"]:
        main = replace(config, sections={**config.sections, "curriculum": None})
        trainer = build_trainer(main, data=data, world=World(), progress=False)
        load_model_state(trainer.model, CheckpointManager(folder.checkpoints_path).load("last").model_state)
        found: Numbers = {}
        for split in ("validation", "test"):
            if (loader := data.loader(split)) is not None:
                numbers = trainer.evaluate(loader)
                found[split] = {key: value for key, value in numbers.items() if not math.isnan(value)}
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        saved = {"step": result["step"], "parameters": parameters, "splits": found}
        write_text(path, json.dumps(saved, indent=2) + "\n")
    seed = config.training.seed
    run = ComparedRun(name, seed, str(folder.path), result["step"], result["samples"], saved["parameters"])
    return saved["splits"], run
