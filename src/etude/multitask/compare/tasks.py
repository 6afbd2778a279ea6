"""One model for all tasks against one model for each, of the same size and for the same budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.config import Selection
from etude.core import ConfigError
from etude.core.spelling import suggest
from etude.data import DataLoader
from etude.engine.step import GradientAccumulator
from etude.multitask.compare.alone import sections_of_one
from etude.multitask.compare.runs import (
    Numbers,
    Runner,
    chosen_seeds,
    ready,
    train_and_measure,
    with_training,
    write_tables,
)
from etude.multitask.compare.tables import ComparedRun, Comparison, make_rows

BUDGETS = ("share", "whole")
MULTI = "multi-task"


def compare_tasks(
    runner: Runner,
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
    config = runner.load(experiment, overrides)
    if len(config.tasks or {}) < 2:
        raise ConfigError(
            f"{config.document.place('tasks')}: there must be two tasks or more to compare a model of all with models "
            f"of each, found {len(config.tasks or {})}"
        )
    data = ready(runner, config)
    root = Path(out) if out is not None else Path("runs") / config.name / "compare"
    chosen = chosen_seeds(config, seeds)
    runs: list[ComparedRun] = []
    multi: list[Numbers] = []
    single: dict[str, list[Numbers]] = {task: [] for task in config.tasks}
    for seed in chosen:
        tell(f"seed {seed}: one model for {', '.join(config.tasks)}")
        whole = with_training(config, seed=seed)
        numbers, multi_run = train_and_measure(runner, MULTI, whole, data, root, progress=progress)
        multi.append(numbers)
        runs.append(multi_run)
        for task in config.tasks:
            alone = single_task_config(whole, task, data)
            own = runner.data(alone)
            steps = multi_run.steps if budget == "whole" else steps_for(own, multi_run.samples[task])
            tell(f"seed {seed}: a model for {task} alone, {steps} steps")
            alone = _for_steps(alone, steps, of_steps=multi_run.steps)
            numbers, run = train_and_measure(runner, task, alone, own, root, progress=progress)
            single[task].append(numbers)
            runs.append(run)
    rows = make_rows(list(config.tasks), multi, single)
    comparison = Comparison(config.name, budget, chosen, tuple(runs), rows)
    write_tables(root, comparison)
    return comparison


def single_task_config(config: Any, task: str, data: Any) -> Any:
    """Return the experiment with one task alone, in its main variant."""
    name = f"{config.name}: {task} alone"
    alone = sections_of_one(config.sections, task, data.splits)
    return replace(config, name=name, sections={**alone, "name": name})


def steps_for(data: Any, samples: int) -> int:
    """Return the fewest optimizer steps that read so many samples of the training data or more.

    An epoch may end with a smaller batch, and with a step of fewer micro-batches.
    """
    loader: DataLoader = data.loader("train")
    accumulator = GradientAccumulator(accumulation_steps=data.config.grad_accum_steps)
    whole = loader.epoch_samples
    steps = epoch = 0
    while samples > whole:
        steps += accumulator.num_steps(len(loader), range(epoch, epoch + 1))
        samples -= whole
        epoch += 1
    return max(1, steps - (-samples // (loader.batch_size * accumulator.steps_at(epoch))))


def _for_steps(config: Any, steps: int, *, of_steps: int) -> Any:
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
