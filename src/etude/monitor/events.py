"""The event stream of a run: one typed object for each thing that a program may want to know.

    RunStarted          a run, or a part of one after a resume, begins
    EpochStarted
    StepsLogged         averages since the last log point
    Validated           metrics of a validation
    EpochEnded          averages of an epoch, with its validation
    CheckpointSaved     a checkpoint is safely on disk
    PhaseStarted        a phase of a curriculum begins
    Warned              something looks wrong
    Recovered           something went wrong and was handled: skipped updates, a damaged checkpoint
    Noted               another message: how the step is executed, parameters that are trained from now on
    MediaLogged         a text, a matrix or a picture
    RunEnded            finished, stopped, interrupted or failed

Every event knows its time (seconds since 1970), step and epoch (counted from zero). `record_of` returns it as plain
data, in the form of the run folder's files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

Media = Literal["text", "matrix", "image"]
Status = Literal["finished", "stopped", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events have."""

    kind: ClassVar[str] = ""
    time: float
    step: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A run begins, or continues from a checkpoint if `resumed`."""

    kind: ClassVar[str] = "start"
    message: str = ""
    name: str = ""
    device: str = ""
    resumed: bool = False
    processes: int = 1
    """Processes that train together."""
    restart: int = 0
    """How often an elastic launcher has restarted the processes after losing one."""
    total_steps: int | None = None
    total_epochs: int | None = None
    steps_per_epoch: int | None = None
    parameters: int = 0
    trainable: int = 0
    """Parameters that are trained."""
    monitor: str = ""
    """The metric by which the run is judged."""
    mode: str = ""
    run_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStarted(Event):
    """The first step of an epoch follows."""

    kind: ClassVar[str] = "epoch_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEvent(Event):
    """Base class of events with metrics; `split` is the name of their records in metrics.jsonl."""

    split: ClassVar[str] = ""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsLogged(MetricsEvent):
    """Averages since the last log point."""

    kind: ClassVar[str] = "log"
    split: ClassVar[str] = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated(MetricsEvent):
    """Metrics of a validation; their names start with `val_`."""

    kind: ClassVar[str] = "validation"
    split: ClassVar[str] = "val"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded(MetricsEvent):
    """Averages of an epoch, with those of its validation."""

    kind: ClassVar[str] = "epoch"
    split: ClassVar[str] = "epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is safely on disk."""

    kind: ClassVar[str] = "checkpoint"
    message: str = ""
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Event):
    """Base class of events that are messages; `facts` are plain data for programs."""

    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted(Message):
    """A phase begins; its facts are number, tasks, weights …"""

    kind: ClassVar[str] = "phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Message):
    """Something looks wrong."""

    kind: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Message):
    """Something went wrong and was handled."""

    kind: ClassVar[str] = "recovery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Message):
    """Another message; `topic` tells about what: execution, restore, unfreeze …"""

    kind: ClassVar[str] = "note"
    topic: str = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLogged(Event):
    """A text, a matrix (a confusion matrix with its classes) or the path of a picture."""

    kind: ClassVar[str] = "media"
    name: str
    media: Media
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The run is over, or this part of it."""

    kind: ClassVar[str] = "end"
    status: Status = "finished"
    message: str = ""
    """Why it ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def record_of(event: Event) -> dict[str, Any]:
    """Return an event as plain data, as it is written to a file of the run folder.

    >>> record_of(StepsLogged(time=9.0, step=100, epoch=1, metrics={"loss": 0.5}))
    {'step': 100, 'epoch': 1, 'split': 'train', 'time': 9.0, 'loss': 0.5}
    >>> record_of(Warned(time=9.0, step=100, message="no gradient", facts={"layers": ["fc"]}))
    {'time': 9.0, 'kind': 'warning', 'step': 100, 'epoch': 0, 'message': 'no gradient', 'layers': ['fc']}
    """
    if isinstance(event, MetricsEvent):
        place = {"step": event.step, "epoch": event.epoch, "split": event.split, "time": event.time}
        return {**place, **{name: value for name, value in event.metrics.items() if name not in place}}
    named = {one.name: getattr(event, one.name) for one in fields(event)}
    named.pop("time")
    facts = named.pop("facts", {})
    kind = "resume" if named.get("resumed") else named.pop("topic", event.kind)
    return {"time": event.time, "kind": kind, **named, **{key: one for key, one in facts.items() if key not in named}}
