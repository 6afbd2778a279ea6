"""The sections `tasks` and `curriculum`: what they may say, and each task in each of its forms."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from etude.config import Section, SectionModel, Selection, SuppliedSection
from etude.multitask.curriculum import Phase

Head = Annotated[Any, SuppliedSection("head", frozenset({"in_features", "vocab_size"}))]
Loss = Annotated[Any, Section("loss")]
MetricOfTask = Annotated[Any, SuppliedSection("metric", frozenset({"num_classes", "num_labels"}))]
StreamOrData = Annotated[str | Annotated[Any, Section("data")], Field(union_mode="left_to_right")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Names of tasks and variants become names of modules and of numbers in logs."""

Phases = Annotated[list[Phase], Field(min_length=1)] | Literal["default"]
"""What the section `curriculum` holds."""


class VariantSection(SectionModel):
    """Another form of a task, which a phase of the curriculum may choose; what it leaves out is as in the task."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    head: Head | None = None
    """The layers of this task alone, on top of the shared model."""
    loss: Loss | None = None
    """The loss; language_modeling for the head language_model if left out."""
    data: StreamOrData | None = None
    """The stream it learns from, or a data set of its own; any batch that has its labels if left out."""
    labels: str | None = None
    """The key of its labels in a batch; the usual ones if left out."""
    causal: bool | None = None
    """Whether a position sees only those before it; as the model does by itself if left out."""
    metrics: list[MetricOfTask] | None = None
    """Metrics that are computed in validation."""


class TaskSection(VariantSection):
    """One task of several that share a model."""

    head: Head
    """The layers of this task alone, on top of the shared model."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """How much its loss counts."""
    variants: dict[Name, VariantSection] = Field(default_factory=dict)
    """Other forms of the task, by name: each says only what is different."""


@dataclass(frozen=True, slots=True)
class TaskForm:
    """A task as it is trained: the task itself, or one of its variants with all it takes from the task."""

    task: str
    variant: str | None
    head: Selection
    loss: Selection
    data: str | Selection | None
    labels: str | None
    causal: bool | None
    metrics: tuple[Selection, ...]
    own: frozenset[str]
    """The keys that the variant says itself; of the task itself, all of them."""

    @property
    def name(self) -> str:
        """`task`, or `task:variant`."""
        return self.task if self.variant is None else f"{self.task}:{self.variant}"

    @property
    def head_name(self) -> str:
        """The name of its head: that of the task, unless the variant has a head of its own."""
        return self.name if "head" in self.own else self.task

    @property
    def stream(self) -> str | None:
        """The stream that it learns from; a data set of its own is a stream called `task`, or `task-variant`."""
        if isinstance(self.data, Selection):
            return self.name.replace(":", "-") if "data" in self.own else self.task
        return self.data

    def path(self, key: str) -> str:
        """Return the dotted path of the value that holds for this form."""
        inside = "" if self.variant is None or key not in self.own else f".variants.{self.variant}"
        return f"tasks.{self.task}{inside}.{key}"


_KEYS = tuple(VariantSection.model_fields)


def forms_of(name: str, section: TaskSection) -> Iterator[TaskForm]:
    """Yield the task itself, then its variants."""
    given: dict[str, Any] = {key: getattr(section, key) for key in _KEYS}
    yield _form(name, None, given, frozenset(_KEYS))
    for variant, changes in section.variants.items():
        changed = {key: getattr(changes, key) for key in _KEYS if getattr(changes, key) is not None}
        yield _form(name, variant, given | changed, frozenset(changed))


def all_forms(tasks: Mapping[str, TaskSection]) -> list[TaskForm]:
    """Return every form of every task."""
    return [form for name, section in tasks.items() for form in forms_of(name, section)]


def _form(task: str, variant: str | None, values: Mapping[str, Any], own: frozenset[str]) -> TaskForm:
    return TaskForm(task, variant, **{**values, "metrics": tuple(values["metrics"] or ())}, own=own)
