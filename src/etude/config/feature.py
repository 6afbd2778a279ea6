"""What an optional package, such as `multitask`, adds to experiment files: sections, checks and parts of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from etude.config.document import Document
from etude.config.schema import SectionSpec
from etude.config.selection import Selection, plain
from etude.config.signature import SectionModel


@dataclass(slots=True)
class RunDraft:
    """The components of a run before its `Trainer` exists: features add to it and replace their own parts."""

    sections: Mapping[str, Any]
    document: Document
    world_size: int = 1
    """Number of training processes."""
    splits: Any = None
    """The data, a `DataSplits`; None in a check without data."""
    vocab_size: int | None = None
    """Vocabulary size that the model needs, if the data or the features know it."""
    given: dict[str, Any] = field(default_factory=dict)
    """Values passed to losses whose signature asks for them, by argument name."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Data about the run that checkpoints keep."""
    model: Any = None
    callbacks: list[Any] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the `Trainer`, such as `task`, which replaces `loss`."""


class Feature:
    """An optional package's part in experiment files; every method does nothing by default.

    Features are found by the sections they handle, and are imported only for files that use them.
    """

    sections: ClassVar[Mapping[str, SectionSpec]] = {}
    """The top-level keys of a file that the feature handles."""

    def move_legacy_keys(self, document: Document, training: dict[str, Any]) -> None:
        """Move the feature's settings of older files from `training` to their own section."""

    def training_models(self) -> dict[str, type[SectionModel]]:
        """Return the schemas of the keys of `training` that the feature reads, for editors."""
        return {}

    def settle(self, sections: dict[str, Any], document: Document) -> None:
        """Check the validated sections and fill in missing values; raise ConfigError for mistakes."""

    def plain(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the feature's sections in the form of a file."""
        return {key: plain(sections[key]) for key in self.sections if sections.get(key) is not None}

    def trainer_settings(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `training` that set the feature's sections for a `Trainer` made in Python."""
        return {}

    def data_sets(self, sections: Mapping[str, Any]) -> dict[str, tuple[str, Selection]]:
        """Return data sets besides that of the `data` section: name to dotted path and component."""
        return {}

    def join_data(self, sections: Mapping[str, Any], document: Document, shared: Any, own: Mapping[str, Any]) -> Any:
        """Return the data of the run, built from the `data` section (or None) and the feature's data sets."""
        return shared

    def before_model(self, draft: RunDraft) -> None:
        """Change the draft after the data is loaded and before the model is built."""

    def after_model(self, draft: RunDraft) -> None:
        """Change the draft after the model is built; in a check without data, weights may be on the meta device."""

    def evaluating(self, trainer: Any, checkpoint: Any) -> None:
        """Prepare the trainer to evaluate a checkpoint; raise CheckpointError if the checkpoint does not match."""
