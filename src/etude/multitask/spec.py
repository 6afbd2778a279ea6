"""The definition of a task: its batches, its head, and its loss and metrics."""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.core.batch import STREAM, Batch, targets_of
from etude.core.errors import ConfigError, EtudeError, TrainingError
from etude.core.spelling import suggest
from etude.losses.functional import IGNORE_INDEX
from etude.losses.inferred import InferredLoss
from etude.losses.strategies import ClassificationLoss, LossStrategy
from etude.losses.task import as_strategy
from etude.losses.wrapped import LossFunction
from etude.metrics.metric_set import MetricLike, Together
from etude.multitask.curriculum.phase import check_weight


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One task: what it reads, which head predicts, and its loss and metrics.

    >>> from torch import nn
    >>> TaskSpec("multi_label_head", nn.BCEWithLogitsLoss(), labels="quality", weight=0.5).weight
    0.5
    """

    head: str
    """The head of the `MultiTaskModel` for this task."""
    loss: LossStrategy | LossFunction | None = None
    """As for a `Trainer`: a strategy, a torch loss, a function, or None to choose by shapes."""
    stream: str | None = None
    """Learns only from batches of this stream; None: from every batch with its labels."""
    labels: str | None = None
    """The key of its labels in the batch; None: `labels`, or what the loss derives from the inputs (next tokens)."""
    weight: float = 1.0
    """The weight of its loss."""
    causal: bool | None = None
    """If set, whether attention is causal: passed to the model in the batch."""
    metrics: Mapping[str, MetricLike] = field(default_factory=dict)
    """Computed in validation, in addition to the metrics of the loss, as `metrics` of a `Trainer`; by name."""
    variants: Mapping[str, "TaskSpec"] = field(default_factory=dict)
    """Variants of the task, by name; a phase of a curriculum may select one."""


class ActiveTask(NamedTuple):
    """An active task: its current variant, and the strategy and metrics of that variant."""

    spec: TaskSpec
    strategy: LossStrategy
    measures: Together


def strategy_of(spec: TaskSpec) -> LossStrategy:
    """Return the loss of a task. Samples may lack labels of some tasks: -100 marks them in every loss."""
    if spec.loss is None:
        return InferredLoss(IGNORE_INDEX)
    strategy = as_strategy(spec.loss)
    if isinstance(strategy, ClassificationLoss) and strategy.ignore_index is None:
        strategy = copy(strategy)
        strategy.ignore_index = IGNORE_INDEX
    return strategy


def learns_from(task: str, spec: TaskSpec, batch: Batch) -> bool:
    """Whether a task learns from a batch; raises TrainingError if the batch lacks labels that it should have."""
    keys = tuple(batch) if isinstance(batch, Mapping) else ()
    if spec.stream is None:
        if spec.labels is None and isinstance(batch, Mapping):
            return STREAM not in batch or targets_of(batch)[0] is not None
        return spec.labels is None or spec.labels in keys
    if STREAM not in keys:
        raise TrainingError(
            f"the task '{task}' reads the stream '{spec.stream}', but batches do not name their stream; use `data: "
            "streams` (StreamLoader), or remove the stream"
        )
    if batch[STREAM] == spec.stream and spec.labels is not None:
        check_labels({task: spec}, [key for key in keys if key != STREAM], spec.stream)
    return bool(batch[STREAM] == spec.stream)


class explained:
    """Add the name of the task to errors inside this block."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EtudeError):
            raise type(error)(f"task '{self.task}': {error}") from error


def check_labels(tasks: Mapping[str, TaskSpec], keys: Collection[str], stream: str | None) -> None:
    """Raise TrainingError for a task or variant of this stream (None: of any) whose labels are in no batch."""
    for task, spec in tasks.items():
        for one in (spec, *spec.variants.values()) if spec.weight else ():
            if one.stream == stream and one.labels is not None and one.labels not in keys:
                where = "no batch has" if stream is None else f"no batch of the stream '{stream}' has"
                raise TrainingError(
                    f"the labels of task '{task}' are '{one.labels}', which {where}{suggest(one.labels, keys)}"
                )


def check_task(name: str, spec: TaskSpec, variant: str = "") -> None:
    """Raise ConfigError for an invalid name, weight or variant."""
    what = f"the task '{name}'" + (f", variant '{variant}'" if variant else "")
    if not name or "/" in name:
        raise ConfigError(f"'{name}' is not a valid task name; use a non-empty name without '/'")
    check_weight(spec.weight, f"the weight of {what}")
    for other, one in spec.variants.items():
        if one.variants:
            raise ConfigError(f"{what}: its variant '{other}' has variants itself; define all variants in the task")
        check_task(name, one, other)


def check_known(what: str, task: str, tasks: Collection[str]) -> None:
    """Raise ConfigError, with the closest name, for an unknown task."""
    if task not in tasks:
        raise ConfigError(f"{what} names the task '{task}', which is not defined{suggest(task, tasks)}")
