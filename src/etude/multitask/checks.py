"""Whether the sections about tasks agree with each other: every name means something, nothing is said twice."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from etude.config import (
    Document,
    Problem,
    Selection,
    build_selection,
    config_error,
    names,
    select_component,
)
from etude.core import ConfigError
from etude.core.spelling import did_you_mean, listed, suggest
from etude.multitask.curriculum import ALL, DEFAULT_PHASES, Curriculum, Phase
from etude.multitask.sections import TaskSection, TaskVariant, all_variants

SHARED = "data"
"""The stream that a plain data section becomes where tasks have data sets of their own beside it."""


def settle_tasks(sections: dict[str, Any], document: Document) -> None:
    """Fill in the defaults of `tasks` and `curriculum`, in the sections; raise ConfigError if they contradict."""
    tasks: dict[str, TaskSection] | None = sections.get("tasks")
    if tasks is None:
        _refuse_without_tasks(sections, document)
        return
    problems = list(_whole(tasks, sections))
    problems += [problem for name, task in tasks.items() if (problem := _settle_loss(name, task, document))]
    if sections.get("curriculum") == "default":
        sections["curriculum"] = list(DEFAULT_PHASES)
        problems += _default_phases(tasks)
    phases: list[Phase] = sections.get("curriculum") or []
    if not problems:
        problems += _phases(phases, tasks)
    if not problems:
        problems += _own_data(all_variants(tasks), sections)
    known = None if problems else streams_named(tasks, sections)
    if known is not None:
        problems += stream_problems(tasks, phases, known)
    if problems:
        raise config_error(problems, document)
    make_curriculum(phases, tasks, document)
    if (weighting := sections.get("weighting")) is not None:
        build_selection(weighting, path="weighting", document=document, provided={"tasks": tuple(tasks)})


def make_curriculum(
    phases: Sequence[Phase], tasks: Mapping[str, TaskSection], document: Document
) -> Curriculum | None:
    """Return the curriculum of these phases, None if there are none; raise ConfigError if they cannot follow."""
    if not phases:
        return None
    try:
        return Curriculum(phases, {name: task.weight for name, task in tasks.items()})
    except ConfigError as error:
        raise ConfigError(f"{document.place('curriculum')}: {error}") from error


def streams_named(tasks: Mapping[str, TaskSection], sections: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of all streams as far as the config names them; None if only the data knows."""
    own = [str(variant.stream) for variant in all_variants(tasks) if variant.own_data is not None]
    given = _given_streams(sections)
    if given is None and not own:
        return None
    return (*((SHARED,) if given is None else given), *own)


def _given_streams(sections: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the streams that the data section names; None if it is a section of another kind."""
    data: Selection | None = sections.get("data")
    given = {} if data is None else data.arguments.get("streams") if data.component.name == "streams" else None
    return tuple(given) if isinstance(given, Mapping) else None


def stream_problems(
    tasks: Mapping[str, TaskSection], phases: Sequence[Phase], known: Collection[str]
) -> Iterator[Problem]:
    """Yield what is wrong with the names of streams in tasks and phases; `known` is empty if the data has none."""
    for variant in all_variants(tasks):
        if isinstance(variant.data, str) and "data" in variant.own and variant.data not in known:
            yield Problem(variant.path("data"), _no_stream(variant.data, known))
    for place, phase in enumerate(phases):
        for name in phase.mixture or ():
            if name not in known:
                yield Problem(f"curriculum.{place}.mixture.{name}", _no_stream(name, known))
        if phase.sequence_length is not None and not known:
            yield Problem(
                f"curriculum.{place}.sequence_length",
                "the data section has no streams, whose length a phase could set; use `data: {name: streams, …}`",
            )


def _no_stream(name: str, known: Collection[str]) -> str:
    if not known:
        return f"the data section has no streams, so '{name}' is none; use `data: {{name: streams, …}}`"
    is_component = f"; as a data set of its own, write it as a mapping: {{name: {name}, …}}"
    hint = did_you_mean(name, known) or (is_component if name in names("data") else "")
    return f"there is no stream '{name}'{hint} (there are: {listed(known)})"


def _refuse_without_tasks(sections: Mapping[str, Any], document: Document) -> None:
    problems = [
        Problem(name, "needs tasks, and there is no `tasks:` section; add one, or take this one out")
        for name in ("weighting", "curriculum")
        if sections.get(name) is not None
    ]
    if problems:
        raise config_error(problems, document)


def _whole(tasks: Mapping[str, TaskSection], sections: Mapping[str, Any]) -> Iterator[Problem]:
    if not tasks:
        yield Problem("tasks", "there is no task; name at least one, or take the section out")
    if sections.get("loss") is not None:
        yield Problem("loss", "every task has a loss of its own; move it to `tasks`, or take it out")
    if sections.get("data") is not None and _given_streams(sections) == ():
        yield Problem("data.streams", "there is no stream; name at least one")
    for name in tasks:
        if name.startswith("val_"):
            yield Problem(
                f"tasks.{name}", "numbers of validation begin with 'val_', so no task does; call it otherwise"
            )
    if (weighting := sections.get("weighting")) is not None and "tasks" in weighting.arguments:
        yield Problem("weighting.tasks", "its tasks are those of the section `tasks`; take this out")
    if tasks and not any(task.weight for task in tasks.values()):
        yield Problem("tasks", "no task has a weight above 0: there is nothing to learn from")


def _settle_loss(name: str, task: TaskSection, document: Document) -> Problem | None:
    """Give a language model its loss; say what is missing for any other head."""
    if task.loss is None:
        if task.head.component.name != "language_model":
            return Problem(f"tasks.{name}.loss", f"missing; name a loss (there are: {listed(names('loss'))})")
        task.loss = select_component("loss", "language_modeling", path=f"tasks.{name}.loss", document=document)
    return None


def _default_phases(tasks: Mapping[str, TaskSection]) -> Iterator[Problem]:
    named = {name: set[str]() for phase in DEFAULT_PHASES if phase.tasks != ALL for name in phase.tasks}
    for phase in DEFAULT_PHASES:
        for name, variant in phase.variants.items():
            named[name].add(variant)
    if any(name not in tasks or variants - set(tasks[name].variants) for name, variants in named.items()):
        needs = [f"{name} ({listed(sorted(variants))})" if variants else name for name, variants in named.items()]
        yield Problem("curriculum", f"the default phases need these tasks (with variants): {listed(needs)}")


def _phases(phases: Sequence[Phase], tasks: Mapping[str, TaskSection]) -> Iterator[Problem]:
    for place, phase in enumerate(phases):
        for number, name in enumerate(() if phase.tasks == ALL else phase.tasks):
            if name not in tasks:
                yield Problem(f"curriculum.{place}.tasks.{number}", _no_task(name, phase, tasks))
        for name, variant in phase.variants.items():
            where = f"curriculum.{place}.variants.{name}"
            if name not in tasks and name not in phase.tasks:  # if it is, that was said already
                yield Problem(where, _no_task(name, phase, tasks))
            elif name in tasks and variant not in (known := tasks[name].variants):
                yield Problem(where, f"task '{name}' has no variant '{variant}'{suggest(variant, known)}")
            elif name not in phase.tasks and phase.tasks != ALL:
                yield Problem(
                    where, f"phase '{phase.name}' does not train '{name}'; name it in its tasks, or take this out"
                )
        if place and (task := _unreported(phase, phases[place - 1], tasks)):
            yield Problem(
                f"curriculum.{place}.start.metric",
                f"'{phase.begins.metric}' will not be reported: the phase before, '{phases[place - 1].name}', does not "
                f"train a task '{task}'" + ("" if task in tasks else did_you_mean(task, tasks)),
            )


def _unreported(phase: Phase, before: Phase, tasks: Collection[str]) -> str | None:
    """Return the task of the metric that a phase waits for, if the phase before does not train it."""
    metric = phase.begins.metric or ""
    task, slash, _ = metric.removeprefix("val_").rpartition("/")
    trained = tasks if before.tasks == ALL else before.tasks
    about_a_task = slash and (task in tasks or metric.startswith("val_"))
    return task if about_a_task and task not in trained and before.begins.fixed else None


def _no_task(name: str, phase: Phase, tasks: Collection[str]) -> str:
    return f"phase '{phase.name}' names the task '{name}', which is not defined{suggest(name, tasks)}"


def _own_data(variants: Sequence[TaskVariant], sections: Mapping[str, Any]) -> Iterator[Problem]:
    given = _given_streams(sections)
    taken = (SHARED,) if given is None else given
    for variant in variants:
        if variant.own_data is not None and variant.stream in taken:
            yield Problem(
                variant.path("data"), f"there is a stream '{variant.stream}' already; call it or the task otherwise"
            )
    if sections.get("data") is None and all(variant.data is None for variant in variants):
        yield Problem("tasks", "no task has data, and there is no `data:` section; add one")
