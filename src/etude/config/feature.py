"""What a room of its own, such as several tasks, adds to experiment files: sections, checks and parts of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from etude.config.document import Document
from etude.config.schema import SectionSpec
from etude.config.selection import Selection, plain
from etude.config.signature import SectionModel


@dataclass(slots=True)
class RunDraft:
    """What a run is made of, before its `Trainer` is: features add to it and replace what is theirs."""

    sections: Mapping[str, Any]
    document: Document
    world_size: int = 1
    """How many processes train."""
    splits: Any = None
    """The data, a `DataSplits`; None in a check without data."""
    vocab_size: int | None = None
    """How many tokens the model needs, as far as the data and the features know."""
    given: dict[str, Any] = field(default_factory=dict)
    """What losses are given if their signature asks for it, by argument."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What checkpoints keep about the run."""
    model: Any = None
    callbacks: list[Any] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the `Trainer`, such as `task`, which takes the place of `loss`."""


class Feature:
    """A room's part in experiment files; every method does nothing by default.

    Features are found by the sections they serve, and are imported only for files that need them.
    """

    sections: ClassVar[Mapping[str, SectionSpec]] = {}
    """The top-level keys of a file that the feature serves."""

    def move_legacy_keys(self, document: Document, training: dict[str, Any]) -> None:
        """Move what older files say of the feature under `training` to its own place in the document."""

    def training_models(self) -> dict[str, type[SectionModel]]:
        """Return the schemas of the keys of `training` that the feature reads, for editors."""
        return {}

    def settle(self, sections: dict[str, Any], document: Document) -> None:
        """Check the validated sections and fill in what they leave open; raise ConfigError for mistakes."""

    def plain(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the feature's sections as a file would give them."""
        return {key: plain(sections[key]) for key in self.sections if sections.get(key) is not None}

    def trainer_settings(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `training` that a `Trainer` made in Python takes for the feature's sections."""
        return {}

    def data_sets(self, sections: Mapping[str, Any]) -> dict[str, tuple[str, Selection]]:
        """Return the data sets besides that of the `data` section: by name, its dotted path and the component."""
        return {}

    def join_data(self, sections: Mapping[str, Any], document: Document, shared: Any, own: Mapping[str, Any]) -> Any:
        """Return the data of the run, made of that of the `data` section, or None, and of the feature's data sets."""
        return shared

    def before_model(self, draft: RunDraft) -> None:
        """Change the draft when the data is there and the model is not."""

    def after_model(self, draft: RunDraft) -> None:
        """Change the draft when the model is there; in a check without data, its weights may have no values."""

    def evaluating(self, trainer: Any, checkpoint: Any) -> None:
        """Make the trainer ready to evaluate a checkpoint; raise CheckpointError if that is of something else."""
