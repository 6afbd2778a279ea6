"""One model for all tasks against one model per task, of the same size and for the same budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.config import Selection
from etude.config.signature import parameters_of
from etude.core import ConfigError
from etude.core.spelling import suggest
from etude.data import DataLoader, DataSplits, Streams, make_loader
from etude.engine.step import GradientAccumulator
from etude.multitask.compare.runs import ComparedRuns, Tell, chosen_seeds, folder_of, with_training
from etude.multitask.compare.tables import Comparison, make_rows
from etude.multitask.sections import TaskSection, TaskVariant, variants_of
from etude.multitask.spec import TaskSpec, learns_from

BUDGETS = ("share", "whole")
MULTI = "multi-task"
"""The name of the run that learns all tasks."""


def compare_tasks(
    runner: Any,
    experiment: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    budget: str = "share",
    seeds: Sequence[int] | int | None = None,
    progress: bool = True,
    tell: Tell = lambda _words: None,
) -> Comparison:
    """Train the experiment and one model per task, evaluate them all and write `compare.json` and `compare.md`.

    A single-task model has the same trunk, the head of the task without variants, and its stream; optimizer, schedule
    and batch size are the same, and there is no curriculum, no weighting and no callback. `budget`: "share" gives it
    as many samples as the multi-task run read for its task, rounded up to a whole step, "whole" as many steps as the
    whole multi-task run; its warm-up is shortened in proportion. All models are compared after their last step, on the
    test split if there is one, else on validation. Finished runs in `out` (`runs/<experiment>/compare` by default) are
    not repeated, and an interrupted one is continued. Raises ConfigError if there is nothing to compare, or no
    checkpoint to evaluate.
    """
    if budget not in BUDGETS:
        raise ConfigError(f"unknown budget '{budget}'{suggest(budget, BUDGETS)}")
    config = runner.load(experiment, overrides)
    if len(config.tasks or {}) < 2:
        raise ConfigError(
            f"{config.document.place('tasks')}: there must be two tasks or more to compare a model of all with models "
            f"of each, found {len(config.tasks or {})}"
        )
    runs = ComparedRuns(runner, config, folder_of(config, out, "compare"), progress, tell)
    differing: dict[str, None] = {}
    for seed in chosen_seeds(config, seeds):
        whole = with_training(config, seed=seed)
        multi = runs.add(MULTI, whole, runs.data, f"one model for {', '.join(config.tasks)}")
        for task in config.tasks:
            alone = single_task_config(whole, task, runs.data)
            own, share = runner.data(alone), multi.samples[task]
            steps = multi.steps if budget == "whole" else steps_for(own, share)
            rare = {"validate_interval": 0, "validate_every_steps": None, "checkpoint_interval": 0}
            alone = _with_warmup(with_training(alone, epochs=None, max_steps=steps, **rare), steps / multi.steps)
            read = runs.add(task, alone, own, f"a model for {task} alone, {steps} steps").samples[task]
            if budget == "share" and read != share:
                differing[f"{task} {read:,} instead of {share:,}"] = None
    models = {task: {MULTI: runs.found[MULTI], "single-task": runs.found[task]} for task in config.tasks}
    rows = [row for task, found in models.items() for row in make_rows(task, found)]
    what = "took as many steps" if budget == "whole" else "read as many samples of its task"
    rounded = f", rounded up to whole steps ({'; '.join(differing)})" if differing else ""
    note = f"budget {budget}: each single-task model {what} as the multi-task model{rounded}"
    return runs.write({"budget": budget}, rows, note)


def single_task_config(config: Any, task: str, data: Any) -> Any:
    """Return the experiment with only one task, in its main variant."""
    name = f"{config.name}: {task} alone"
    return replace(config, name=name, sections={**sections_of_one(config.sections, task, data.splits), "name": name})


def steps_for(data: Any, samples: int) -> int:
    """Return the fewest optimizer steps that read at least this many samples of the training data.

    An epoch may end with a smaller batch, and with a step of fewer micro-batches.
    """
    loader: DataLoader = data.loader("train")
    accumulator = GradientAccumulator(accumulation_steps=data.config.grad_accum_steps)
    whole = loader.epoch_samples
    steps = epoch = 0
    while samples > whole:
        steps += accumulator.num_steps(loader.batches_in(epoch), range(epoch, epoch + 1))
        samples -= whole
        epoch += 1
    return max(1, steps - (-samples // (loader.batch_size_in(epoch) * accumulator.steps_at(epoch))))


def _with_warmup(config: Any, share: float) -> Any:
    """Return the experiment with its warm-up shortened to this share, like the run."""
    scheduler = config.selection("scheduler")
    steps = None if scheduler is None else (scheduler.defaults | scheduler.arguments).get("warmup_steps")
    if not isinstance(steps, int) or share >= 1:
        return config
    arguments = {**scheduler.arguments, "warmup_steps": min(steps, max(1, round(steps * share)))}
    return replace(config, sections={**config.sections, "scheduler": replace(scheduler, arguments=arguments)})


def sections_of_one(sections: Mapping[str, Any], task: str, splits: DataSplits) -> dict[str, Any]:
    """Return the sections with one task, without variants and with its own streams; no weighting, phase or callback."""
    section: TaskSection = sections["tasks"][task]
    main = next(variants_of(task, section))
    vocabulary = splits.vocab_size  # from all streams, so that the models have the same size
    head = _with_vocabulary(main.head, vocabulary)
    kept = {key: value for key, value in sections.items() if key not in ("weighting", "curriculum", "callbacks")}
    return kept | {
        "tasks": {task: section.model_copy(update={"variants": {}, "weight": 1.0, "head": head})},
        "model": _with_vocabulary(sections["model"], vocabulary),
        "data": _data_of(main, sections.get("data"), splits),
    }


def _data_of(variant: TaskVariant, data: Selection | None, splits: DataSplits) -> Selection | None:
    """Return the data section with only the streams that a task reads."""
    if isinstance(variant.data, Selection):
        return None
    if data is None or data.component.name != "streams":
        return data
    streams = data.arguments["streams"]
    read = (variant.data,) if variant.data is not None else _streams_read(variant, splits, streams)
    arguments: dict[str, Any] = {"streams": {name: streams[name] for name in read}}
    if len(read) > 1:
        arguments |= {key: data.arguments[key] for key in ("draw", "weights") if key in data.arguments}
        if (weights := arguments.get("weights")) is not None:
            arguments["weights"] = {name: weights[name] for name in read}
    return Selection(data.component, arguments, {})


def _streams_read(variant: TaskVariant, splits: DataSplits, known: Iterable[str]) -> tuple[str, ...]:
    """Return the streams whose batches have the labels of a task that names no stream."""
    assert isinstance(splits.train, Streams)
    parts = {name: part for name, part in splits.train.parts.items() if name in known}
    spec = TaskSpec(variant.head_name, labels=variant.labels)
    firsts = {name: next(iter(make_loader(Streams({name: part}), 1))) for name, part in parts.items()}
    return tuple(name for name, batch in firsts.items() if learns_from(variant.task, spec, batch))


def _with_vocabulary(selection: Selection, vocab_size: int | None) -> Selection:
    takes = "vocab_size" in parameters_of(selection.component.factory)[0]
    if not takes or vocab_size is None or selection.arguments.get("vocab_size") is not None:
        return selection
    return replace(selection, arguments={**selection.arguments, "vocab_size": vocab_size})
