"""The section `vocab` and the loss `meaningful` of experiment files: what they add to a config and to its run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field
from torch import Tensor

from etude.config import (
    Document,
    Feature,
    Problem,
    RunDraft,
    SectionModel,
    SectionSpec,
    Selection,
    config_error,
    selections_in,
)
from etude.core import ConfigError, DataError
from etude.data import DataSplits
from etude.multimodal.folder import Modalities
from etude.multimodal.loss_section import (
    LOSS_PROVIDED,
    MEANINGFUL,
    NO_VOCABULARY,
    OF_A_TASK,
    loss_problems,
    meaningful_loss,
)
from etude.multimodal.training import check_vocabulary, describe_vocabulary
from etude.multimodal.vocab import SPECIAL, VocabSpec, build_vocab_spec

Size = Annotated[int, Field(ge=1)]


class VocabSection(SectionModel):
    """How many tokens each modality has; ids follow each other in the order special, image, scalar, spectrum, others.

    >>> VocabSection(image=100, modalities={"period": 10}).build().range_of("period")
    Modality(name='period', base=106, size=10)
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    image: Size | None = None
    """Tokens of the modality `image`."""
    scalar: Size | None = None
    """Tokens of the modality `scalar`."""
    spectrum: Size | None = None
    """Tokens of the modality `spectrum`."""
    modalities: dict[str, Size] = Field(default_factory=dict)
    """Tokens of any other modality, by name."""
    special: list[str] = Field(default_factory=lambda: list(SPECIAL))
    """The special tokens, from id 0 on; PAD and MISS must be among them."""

    @property
    def is_empty(self) -> bool:
        """Whether the section says nothing of any modality."""
        return self.image is self.scalar is self.spectrum is None and not self.modalities

    def build(self) -> VocabSpec | None:
        """Return the vocabulary, None if the section is empty; raise ConfigError if it contradicts itself."""
        if self.is_empty:
            return None
        return build_vocab_spec(
            self.image, self.scalar, self.spectrum, modalities=self.modalities, special=self.special
        )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What an experiment knows of its tokens."""

    vocab: VocabSpec
    codebooks: Mapping[str, Tensor] = field(default_factory=dict)
    """The values of tokens, of those modalities whose values the data has."""
    edges: Mapping[str, Tensor] = field(default_factory=dict)
    """The bounds of the bins of scalars."""

    @property
    def provided(self) -> dict[str, Any]:
        """What losses are given."""
        return dict(zip(LOSS_PROVIDED, (self.vocab, self.codebooks, self.edges), strict=True))

    def describe(self) -> dict[str, Any]:
        """Return what checkpoints keep of it."""
        return describe_vocabulary(self.vocab, self.codebooks)


class Vocabularies(Feature):
    """Tokens of several modalities."""

    sections: ClassVar = {
        "vocab": SectionSpec(
            model=VocabSection, description="How many tokens each modality has, where the data does not tell."
        )
    }

    def settle(self, sections: dict[str, Any], document: Document) -> None:
        """Raise ConfigError if `vocab` contradicts itself, the data or a loss."""
        settle_vocabulary(sections, document)

    def plain(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section unless it says nothing."""
        section: VocabSection | None = sections.get("vocab")
        return {} if section is None or section.is_empty else super().plain(sections)

    def before_model(self, draft: RunDraft) -> None:
        """Give the vocabulary to losses and checkpoints, and its size to the model."""
        section = draft.sections.get("vocab") or VocabSection()
        vocabulary = find_vocabulary(section, draft.splits, draft.document)
        if vocabulary is not None:
            # The data may ask for room for more.
            draft.vocab_size = max(draft.vocab_size or 0, vocabulary.vocab.vocab_size)
            draft.given |= vocabulary.provided
            draft.facts |= vocabulary.describe()

    def evaluating(self, trainer: Any, checkpoint: Any) -> None:
        """Raise CheckpointError if the checkpoint is of another vocabulary."""
        check_vocabulary(checkpoint.meta, trainer.meta, checkpoint.path)


def find_vocabulary(section: VocabSection, splits: DataSplits, document: Document) -> Vocabulary | None:
    """Return the vocabulary of the data, else that of the section; raise ConfigError if they do not agree."""
    said = section.build()
    modalities = splits.token_schema
    if isinstance(modalities, Modalities):
        if said is not None:
            _refuse([Problem("vocab", text) for text in _disagreement(said, modalities.vocab)], document)
        return Vocabulary(modalities.vocab, modalities.codebooks, modalities.edges)
    if said is None:
        return None
    if splits.vocab_size is not None and splits.vocab_size > said.vocab_size:
        text = f"the data has {splits.vocab_size} tokens, the vocabulary only {said.vocab_size}; enlarge it"
        _refuse([Problem("vocab", text)], document)
    return Vocabulary(said)


def settle_vocabulary(sections: Mapping[str, Any], document: Document) -> None:
    """Raise ConfigError if `vocab` contradicts itself, the data or a loss, as far as that is known without the data."""
    section: VocabSection = sections.get("vocab") or VocabSection()
    try:
        said = section.build()
    except ConfigError as error:
        raise config_error([Problem("vocab", str(error))], document) from error
    try:
        told, is_known = _peek(sections.get("data"))
    except DataError as error:
        raise config_error([Problem("data.root", str(error))], document) from error
    problems: list[Problem] = []
    if said is not None and told is not None:
        problems += [Problem("vocab", text) for text in _disagreement(said, told)]
    vocab = told if told is not None else said
    for path, one in selections_in(sections).items():
        if path != "loss" and one.component.factory is meaningful_loss:
            problems.append(Problem(path, OF_A_TASK))
    loss: Selection | None = sections.get("loss")
    if loss is not None and loss.component.name == MEANINGFUL:
        if vocab is not None:
            problems += loss_problems("loss", loss, vocab)
        elif is_known:
            problems.append(Problem("loss", NO_VOCABULARY))
    _refuse(problems, document)


def _peek(data: Selection | None) -> tuple[VocabSpec | None, bool]:
    """Return the vocabulary that lies beside token files, and whether it is known that there is or is not one."""
    if data is None or data.component.name != "tokens":
        return None, False
    root = (data.defaults | data.arguments).get("root")
    folder = Path(str(root)).expanduser()
    if (folder / "vocab.json").is_file():
        return VocabSpec.load(folder / "vocab.json"), True
    return None, (folder / "train.bin").is_file()


def _disagreement(said: VocabSpec, told: VocabSpec) -> Iterator[str]:
    if difference := told.difference(said, "the data", "this section"):
        yield f"differs from the vocabulary of the data: {difference}; leave this section out to take that of the data"


def _refuse(problems: list[Problem], document: Document) -> None:
    if problems:
        raise config_error(problems, document)


FEATURE = Vocabularies()
