"""Checks that the sections about tasks are consistent: all names are defined, and nothing is given twice."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from etude.config import Document, Problem, Selection, build_selection, config_error, names
from etude.config.schema import select_component
from etude.core import ConfigError
from etude.core.spelling import did_you_mean, listed, suggest
from etude.multitask.curriculum import ALL, DEFAULT_PHASES, Curriculum, Phase
from etude.multitask.sections import TaskSection, TaskVariant, all_variants

SHARED = "data"
"""The name of the stream of a plain data section, if tasks have their own data sets beside it."""


def settle_tasks(sections: dict[str, Any], document: Document) -> None:
    """Fill in the defaults of `tasks` and `curriculum`; raise ConfigError if the sections contradict."""
    tasks: dict[str, TaskSection] | None = sections.get("tasks")
    if tasks is None:
        problems = [
            Problem(name, "needs tasks, and there is no `tasks:` section; add one, or remove this one")
            for name in ("weighting", "curriculum")
            if sections.get(name) is not None
        ]
        refuse(problems, document)
        return
    if sections.get("metrics"):
        refuse([Problem("metrics", "is for one task; give each of the `tasks` its own `metrics`")], document)
    refuse([*_whole(tasks, sections), *_settle_losses(tasks, document)], document)
    if sections.get("curriculum") == "default":
        sections["curriculum"] = list(DEFAULT_PHASES)
    phases: list[Phase] = sections.get("curriculum") or []
    make_curriculum(phases, tasks, document)
    own = _own_data(all_variants(tasks), sections)
    refuse([*_variants(phases, tasks), *_unreported(phases, tasks), *own], document)
    given = _given_streams(sections)
    of_tasks = [str(variant.stream) for variant in all_variants(tasks) if variant.own_data is not None]
    if given is not None or of_tasks:  # else only the data knows its streams
        refuse(stream_problems(tasks, phases, (*((SHARED,) if given is None else given), *of_tasks)), document)
    if (weighting := sections.get("weighting")) is not None:
        build_selection(weighting, path="weighting", document=document, provided={"tasks": tuple(tasks)})


def refuse(problems: Iterable[Problem], document: Document) -> None:
    """Raise ConfigError if there are problems."""
    if found := list(problems):
        raise config_error(found, document)


def make_curriculum(
    phases: Sequence[Phase], tasks: Mapping[str, TaskSection], document: Document
) -> Curriculum | None:
    """Return the curriculum of these phases, None if there are none; raise ConfigError for an invalid order."""
    try:
        return Curriculum(phases, {name: task.weight for name, task in tasks.items()}) if phases else None
    except ConfigError as error:
        raise ConfigError(f"{document.place('curriculum')}: {error}") from error


def _given_streams(sections: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the streams named in the data section; None if it is a section of another kind."""
    data: Selection | None = sections.get("data")
    given = {} if data is None else data.arguments.get("streams") if data.component.name == "streams" else None
    return tuple(given) if isinstance(given, Mapping) else None


def stream_problems(
    tasks: Mapping[str, TaskSection], phases: Sequence[Phase], known: Collection[str]
) -> Iterator[Problem]:
    """Yield the problems with names of streams in tasks and phases; `known` is empty if the data has none."""
    used = [
        (variant.path("data"), variant.data)
        for variant in all_variants(tasks)
        if isinstance(variant.data, str) and "data" in variant.own
    ]
    for place, phase in enumerate(phases):
        used += [(f"curriculum.{place}.mixture.{name}", name) for name in phase.mixture or ()]
    for path, name in used:
        if name not in known:
            hint = "" if known else "; use `data: {name: streams, …}`"
            yield Problem(path, f"there is no stream '{name}'{suggest(name, known)}{hint}")


def _whole(tasks: Mapping[str, TaskSection], sections: Mapping[str, Any]) -> Iterator[Problem]:
    if not any(task.weight for task in tasks.values()):
        yield Problem("tasks", "there is no task with a weight above 0, so nothing would be learned; add one")
    for key in ("loss", "validation_loss"):
        if sections.get(key) is not None:
            yield Problem(key, "every task has its own loss; move it to `tasks`, or remove it")
    if sections.get("data") is not None and _given_streams(sections) == ():
        yield Problem("data.streams", "there is no stream; name at least one")
    for name in tasks:
        if name.startswith("val_"):
            yield Problem(f"tasks.{name}", "task names must not start with 'val_' (reserved); rename it")
    if (weighting := sections.get("weighting")) is not None and "tasks" in weighting.arguments:
        yield Problem("weighting.tasks", "its tasks are those of the section `tasks`; remove this")


def _settle_losses(tasks: Mapping[str, TaskSection], document: Document) -> Iterator[Problem]:
    """Set the loss of a language model; yield what is missing for any other head."""
    for name, task in tasks.items():
        if task.loss is None and task.head.component.name != "language_model":
            yield Problem(f"tasks.{name}.loss", f"missing; set a loss (there are: {listed(names('loss'))})")
        elif task.loss is None:
            task.loss = select_component("loss", "language_modeling", path=f"tasks.{name}.loss", document=document)


def _variants(phases: Sequence[Phase], tasks: Mapping[str, TaskSection]) -> Iterator[Problem]:
    for place, phase in enumerate(phases):
        for name, variant in phase.variants.items():
            where, known = f"curriculum.{place}.variants.{name}", tasks[name].variants
            if variant not in known:
                yield Problem(where, f"task '{name}' has no variant '{variant}'{suggest(variant, known)}")
            elif phase.tasks != ALL and name not in phase.tasks:
                yield Problem(where, f"phase '{phase.name}' does not train '{name}'; add it to its tasks")


def _unreported(phases: Sequence[Phase], tasks: Collection[str]) -> Iterator[Problem]:
    """Yield the phases that wait for a metric of a task which the phase before does not train."""
    for place, (before, phase) in enumerate(pairwise(phases), 1):
        metric = phase.begins.metric or ""
        task, slash, _ = metric.removeprefix("val_").rpartition("/")
        about_a_task = slash and (task in tasks or metric.startswith("val_"))
        trained = tasks if before.tasks == ALL else before.tasks
        if about_a_task and task not in trained and before.begins.fixed:
            hint = "" if task in tasks else did_you_mean(task, tasks)
            words = f"'{metric}' will not be reported: phase '{before.name}' does not train a task '{task}'{hint}"
            yield Problem(f"curriculum.{place}.start.metric", words)


def _own_data(variants: Sequence[TaskVariant], sections: Mapping[str, Any]) -> Iterator[Problem]:
    given = _given_streams(sections)
    taken = (SHARED,) if given is None else given
    for variant in variants:
        if variant.own_data is not None and variant.stream in taken:
            yield Problem(
                variant.path("data"), f"there is a stream '{variant.stream}' already; rename it or the task"
            )
    if sections.get("data") is None and all(variant.data is None for variant in variants):
        yield Problem("tasks", "no task has data, and there is no `data:` section; add one")
