"""The sections `tasks` and `curriculum`: their schemas, and each task in each of its variants."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from etude.config import Section, SectionModel, Selection
from etude.multitask.curriculum import Phase

Head = Annotated[Any, Section("head", frozenset({"in_features", "vocab_size"}))]
Loss = Annotated[Any, Section("loss")]
MetricOfTask = Annotated[Any, Section("metric", frozenset({"num_classes", "num_labels"}))]
StreamOrData = Annotated[str | Annotated[Any, Section("data")], Field(union_mode="left_to_right")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Names of tasks and variants become names of modules and of metrics in logs."""

Phases = Annotated[list[Phase], Field(min_length=1)] | Literal["default"]
"""The content of the section `curriculum`."""


class VariantSection(SectionModel):
    """A variant of a task, which a phase of the curriculum may select; unset keys are those of the task."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    head: Head | None = None
    """The layers of only this task, on top of the shared model."""
    loss: Loss | None = None
    """The loss; by default language_modeling for the head language_model."""
    data: StreamOrData | None = None
    """The stream it learns from, or its own data set; by default any batch with its labels."""
    labels: str | None = None
    """The key of its labels in a batch; by default the usual ones."""
    causal: bool | None = None
    """Whether attention is causal; by default as in the model."""
    metrics: list[MetricOfTask] | None = None
    """Metrics that are computed in validation."""


class TaskSection(VariantSection):
    """One task of several that share a model."""

    head: Head
    """The layers of only this task, on top of the shared model."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """The weight of its loss."""
    variants: dict[Name, VariantSection] = Field(default_factory=dict)
    """Variants of the task, by name: each contains only the differences."""


@dataclass(frozen=True, slots=True)
class TaskVariant:
    """A task as it is trained: the task itself, or one of its variants completed from the task."""

    task: str
    key: str | None
    """Name of the variant; None: the task itself."""
    head: Selection
    loss: Selection
    data: str | Selection | None
    labels: str | None
    causal: bool | None
    metrics: tuple[Selection, ...]
    own: frozenset[str]
    """The keys that the variant itself sets; for the task itself, all of them."""

    @property
    def name(self) -> str:
        """`task`, or `task:variant`."""
        return self.task if self.key is None else f"{self.task}:{self.key}"

    @property
    def head_name(self) -> str:
        """The name of its head: that of the task, unless the variant has its own."""
        return self.name if "head" in self.own else self.task

    @property
    def stream(self) -> str | None:
        """The stream that it learns from; its own data set is a stream named `task`, or `task-variant`."""
        if isinstance(self.data, Selection):
            return self.name.replace(":", "-") if "data" in self.own else self.task
        return self.data

    @property
    def own_data(self) -> Selection | None:
        """The own data set of the task, or of this variant."""
        return self.data if isinstance(self.data, Selection) and "data" in self.own else None

    def path(self, key: str) -> str:
        """Return the dotted path of the value that applies to this variant."""
        inside = "" if self.key is None or key not in self.own else f".variants.{self.key}"
        return f"tasks.{self.task}{inside}.{key}"


_KEYS = tuple(VariantSection.model_fields)


def variants_of(name: str, section: TaskSection) -> Iterator[TaskVariant]:
    """Yield the task itself, then its variants."""
    given: dict[str, Any] = {key: getattr(section, key) for key in _KEYS}
    yield _variant(name, None, given, frozenset(_KEYS))
    for key, changes in section.variants.items():
        changed = {one: getattr(changes, one) for one in _KEYS if getattr(changes, one) is not None}
        yield _variant(name, key, given | changed, frozenset(changed))


def all_variants(tasks: Mapping[str, TaskSection]) -> list[TaskVariant]:
    """Return every variant of every task, the tasks themselves included."""
    return [variant for name, section in tasks.items() for variant in variants_of(name, section)]


def _variant(task: str, key: str | None, values: Mapping[str, Any], own: frozenset[str]) -> TaskVariant:
    return TaskVariant(task, key, **{**values, "metrics": tuple(values["metrics"] or ())}, own=own)
