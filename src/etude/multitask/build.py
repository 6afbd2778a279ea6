"""Building tasks: their streams of data, the model with its heads, and the specs of a `MultiTask`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from etude.checkpoint import check_kind
from etude.config import Document, RunDraft, Selection, build_selection
from etude.core import ConfigError
from etude.core.random import mix, set_seed
from etude.data import DataSplits, Streams, combine_streams
from etude.data.order.streams import stable_number
from etude.engine.callback import Callback
from etude.losses import BinaryLoss, LossStrategy, MultiLabelLoss
from etude.metrics import Measure
from etude.models import feature_dim
from etude.multitask.checks import SHARED, refuse, stream_problems
from etude.multitask.curriculum import Phase
from etude.multitask.model import MultiTaskModel
from etude.multitask.sections import TaskSection, TaskVariant, all_variants, variants_of
from etude.multitask.spec import TaskSpec
from etude.multitask.task import MultiTask
from etude.multitask.weighting import Weighting

# ------------------------------------------------------------------------------------------------ data


def own_data(tasks: Mapping[str, TaskSection]) -> dict[str, tuple[str, Selection]]:
    """Return the tasks' own data sets: by stream, the location in the config and the component."""
    return {
        str(variant.stream): (variant.path("data"), variant.own_data)
        for variant in all_variants(tasks)
        if variant.own_data is not None
    }


def with_own_data(
    sections: Mapping[str, Any], document: Document, shared: DataSplits | None, own: Mapping[str, DataSplits]
) -> DataSplits:
    """Return all data of the tasks: that of the data section, and every task's own data set as a stream."""
    tasks: Mapping[str, TaskSection] = sections["tasks"]
    phases: Sequence[Phase] = sections.get("curriculum") or ()
    if own and shared is not None and isinstance(shared.train, Streams):
        place = document.place(next(iter(own_data(tasks).values()))[0])
        raise ConfigError(f"{place}: the data section has streams already; move this data set to data.streams")
    splits = combine_streams({**({} if shared is None else {SHARED: shared}), **own}) if own else shared
    assert splits is not None
    train = splits.train
    known = (*train.parts, *sorted(train.absent)) if isinstance(train, Streams) else ()
    refuse(stream_problems(tasks, phases, known), document)
    return splits


# ------------------------------------------------------------------------------------------------ model and tasks


def build_tasks(draft: RunDraft) -> tuple[MultiTaskModel, MultiTask]:
    """Put heads on the model and return model and tasks.

    The initial weights of a head depend only on the seed and its name, not on other tasks.
    """
    trunk, tasks, seed = draft.model, draft.sections["tasks"], draft.sections["training"].seed
    known = {"in_features": feature_dim(trunk), "vocab_size": draft.vocab_size}
    supplied = {name: value for name, value in known.items() if value is not None}
    heads: dict[str, nn.Module] = {}
    specs: dict[str, TaskSpec] = {}
    for name, section in tasks.items():
        all_of_task = list(variants_of(name, section))
        for variant in all_of_task:
            if variant.head_name not in heads:
                set_seed(mix(seed, stable_number(variant.head_name)))
                heads[variant.head_name] = _head(draft, variant, supplied)
        main, *others = (_spec(draft, one) for one in all_of_task)
        by_name = {one.key: spec for one, spec in zip(all_of_task[1:], others, strict=True) if one.key}
        specs[name] = replace(main, weight=section.weight, variants=by_name)
    weighting = None
    if (selection := draft.sections.get("weighting")) is not None:
        weighting = _build(draft, "weighting", selection, Weighting, tasks=tuple(tasks))
    model = MultiTaskModel(trunk, heads)
    if weighting is not None and weighting.layer is not None:
        try:
            model.layer_parameters(weighting.layer)
        except ConfigError as error:
            raise ConfigError(f"{draft.document.place('weighting.layer')}: {error}") from error
    task = MultiTask(specs, weighting)
    task.join(model)
    return model, task


def _head(draft: RunDraft, variant: TaskVariant, supplied: Mapping[str, Any]) -> nn.Module:
    head: nn.Module = _build(draft, variant.path("head"), variant.head, nn.Module, **supplied)
    try:
        # A head may create layers when it is added to a model: do it with its own seed.
        MultiTaskModel(draft.model, {variant.head_name: head})
    except ConfigError as error:
        raise ConfigError(f"{draft.document.place(variant.path('head'))}: {error}") from error
    return head


def _spec(draft: RunDraft, variant: TaskVariant) -> TaskSpec:
    loss = _build(draft, variant.path("loss"), variant.loss, **draft.given)
    classes = _classes(variant, loss, draft.vocab_size)
    metrics: dict[str, Any] = {}
    for place, selection in enumerate(variant.metrics):
        said = {"num_classes", "num_labels"} & set(selection.arguments)
        path = f"{variant.path('metrics')}.{place}"
        name, same = selection.component.name, [one.component.name for one in variant.metrics[:place]]
        number = same.count(name) + 1
        metrics[name if number == 1 else f"{name}_{number}"] = _build(
            draft, path, selection, Measure, **({} if said else classes)
        )
    return TaskSpec(
        head=variant.head_name,
        loss=loss,
        stream=variant.stream,
        labels=variant.labels,
        causal=variant.causal,
        metrics=metrics,
    )


def _classes(variant: TaskVariant, loss: LossStrategy, vocab_size: int | None) -> dict[str, int]:
    """Return the classes for metrics: their number, the number of independent labels, or nothing if binary."""
    given = variant.head.defaults | variant.head.arguments
    number = given.get("num_classes")
    if number is None and variant.head.component.name == "linear":
        number = given.get("out_features")
    if number is None and variant.head.component.name == "language_model":
        number = variant.head.arguments.get("vocab_size", vocab_size)
    if isinstance(loss, MultiLabelLoss):
        return {} if number is None else {"num_labels": number}
    return {} if number is None or number < 2 or isinstance(loss, BinaryLoss) else {"num_classes": number}


def _build(draft: RunDraft, path: str, selection: Selection, kind: type = object, **provided: Any) -> Any:
    built = build_selection(selection, path=path, document=draft.document, provided=provided)
    if not isinstance(built, kind):
        name, found = selection.component.name, type(built).__name__
        raise ConfigError(f"{draft.document.place(path)}: {name} is a {found}, not a {kind.__name__}")
    return built


# ------------------------------------------------------------------------------------------------ counting samples


class SampleCount(Callback):
    """Keeps the number of samples that each task has learned from across stops and resumes."""

    def __init__(self, task: MultiTask) -> None:
        super().__init__()
        self.task = task

    def outcome(self) -> dict[str, Any]:
        """Return the counts, for the result of the run."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"samples": dict(self.task.samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts; a new task starts at 0."""
        check_kind(dict[str, dict[str, int]], state, "state")
        for task, count in state["samples"].items():
            if task in self.task.samples:
                self.task.samples[task] = int(count)
