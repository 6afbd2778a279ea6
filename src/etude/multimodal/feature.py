"""The section `vocab` and the loss `meaningful` of experiment files, and what they add to a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from etude.config import Document, Feature, Problem, RunDraft, SectionModel, SectionSpec, Selection, config_error
from etude.config.document import put_setting
from etude.config.selection import selections_in
from etude.core import ConfigError, DataError
from etude.data import DataSplits
from etude.engine.callback import Callback
from etude.multimodal.folder import VOCAB_FILE, Modalities
from etude.multimodal.loss.settings import DEFAULTS, WEIGHT_OF, read_settings, settings_model
from etude.multimodal.loss.strategy import ALIASES, MEANINGFUL, NO_VOCABULARY, MeaningfulLoss
from etude.multimodal.vocab import SPECIAL, VocabSpec, build_vocab_spec

Size = Annotated[int, Field(ge=1)]


class VocabSection(SectionModel):
    """Number of tokens per modality; ids are assigned in the order special, image, scalar, spectrum, others.

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

    def build(self) -> VocabSpec | None:
        """Return the vocabulary, None if the section is empty; raise ConfigError if it is invalid."""
        if any((self.image, self.scalar, self.spectrum, self.modalities)):
            return build_vocab_spec(
                self.image, self.scalar, self.spectrum, modalities=self.modalities, special=self.special
            )
        if "special" in self.model_fields_set:
            raise ConfigError("has special tokens but no modality; add `image: 2048` or `modalities: {class: 8}`")
        return None


class Vocabularies(Feature):
    """Tokens of several modalities."""

    sections: ClassVar = {
        "vocab": SectionSpec(
            model=VocabSection, description="Number of tokens per modality, if the data does not define it."
        )
    }

    def move_legacy_keys(self, document: Document, training: dict[str, Any]) -> None:
        """Move `training.meaningful_loss` to the section `loss`."""
        move_meaningful_loss(document, training)

    def training_models(self) -> dict[str, type[SectionModel]]:
        """Return the schema of `training.meaningful_loss`."""
        return {"meaningful_loss": settings_model()}

    def trainer_settings(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the meaningful loss, for a `Trainer` with `vocab=`."""
        if (loss := _meaningful(sections)) is None:
            return {}
        return {"meaningful_loss": {key: value for key, value in loss.arguments.items() if key in DEFAULTS}}

    def settle(self, sections: dict[str, Any], document: Document) -> None:
        """Raise ConfigError if `vocab` contradicts itself, the data or a loss, as far as known without the data."""
        try:
            said = _section(sections).build()
        except ConfigError as error:
            raise config_error([Problem("vocab", str(error))], document) from error
        try:
            of_data, is_known = _peek(sections.get("data"))
        except DataError as error:
            raise config_error([Problem("data.root", str(error))], document) from error
        problems = [*_disagreement(said, of_data)]
        for path, one in selections_in(sections).items():
            if path != "loss" and one.component.factory is MeaningfulLoss:
                words = "the meaningful loss has a number for each modality, and a task learns from one number"
                problems.append(Problem(path, f"{words}; train it by itself, with `loss:` in place of `tasks:`"))
        if (loss := _meaningful(sections)) is not None:
            if (vocab := of_data or said) is not None:
                problems += _loss_problems(loss, vocab)
            elif is_known:
                problems.append(Problem("loss", NO_VOCABULARY))
        _refuse(problems, document)

    def plain(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Return the section unless it is empty."""
        return {} if _section(sections).build() is None else super().plain(sections)

    def before_model(self, draft: RunDraft) -> None:
        """Pass the vocabulary to losses and checkpoints, and its size to the model."""
        modalities = _find_vocabulary(_section(draft.sections), draft.splits, draft.document)
        if modalities is not None:
            # The data may require a larger one.
            draft.vocab_size = max(draft.vocab_size or 0, modalities.vocab_size)
            draft.given["vocab"] = modalities
            if _meaningful(draft.sections) is None:
                draft.callbacks.append(KeepsVocabulary(modalities))


class KeepsVocabulary(Callback):
    """Keeps the vocabulary in checkpoints and refuses those of another one, unless the loss does so itself."""

    def __init__(self, modalities: Modalities) -> None:
        super().__init__()
        self.modalities = modalities

    def facts(self) -> dict[str, Any]:
        """Return the vocabulary, and the checksums of codebooks and bins."""
        return self.modalities.facts()

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if a checkpoint has another vocabulary or other codebooks."""
        self.modalities.check_facts(saved, place)


def _section(sections: Mapping[str, Any]) -> VocabSection:
    return sections.get("vocab") or VocabSection()


def _meaningful(sections: Mapping[str, Any]) -> Selection | None:
    """Return the section `loss` if it chooses the meaningful loss."""
    loss: Selection | None = sections.get("loss")
    return loss if loss is not None and loss.component.factory is MeaningfulLoss else None


def _find_vocabulary(section: VocabSection, splits: DataSplits, document: Document) -> Modalities | None:
    """Return the modalities of the data, else those of the section; raise ConfigError if they differ."""
    said, modalities = section.build(), splits.token_schema
    if isinstance(modalities, Modalities):
        _refuse([*_disagreement(said, modalities.vocab)], document)
        return modalities
    if said is not None and splits.vocab_size is not None and splits.vocab_size > said.vocab_size:
        text = f"the data has {splits.vocab_size} tokens, the vocabulary only {said.vocab_size}; enlarge it"
        _refuse([Problem("vocab", text)], document)
    return None if said is None else Modalities(said)


def _loss_problems(loss: Selection, vocab: VocabSpec) -> Iterator[Problem]:
    """Yield the modalities of a meaningful loss that are not in this vocabulary."""
    for key in ("weights", "kind", "codebooks", "edges"):
        given = loss.arguments.get(key)
        for name in given if isinstance(given, Mapping) else ():
            try:
                vocab.range_of(name)
            except ConfigError as error:
                yield Problem(f"loss.{key}.{name}", str(error))


def _peek(data: Selection | None) -> tuple[VocabSpec | None, bool]:
    """Return the vocabulary beside token files, and whether its existence is known."""
    if data is None or data.component.name != "tokens":
        return None, False
    root = (data.defaults | data.arguments).get("root")
    folder = Path(str(root)).expanduser()
    if (folder / VOCAB_FILE).is_file():
        return VocabSpec.load(folder / VOCAB_FILE), True
    return None, (folder / "train.bin").is_file()


def _disagreement(said: VocabSpec | None, of_data: VocabSpec | None) -> Iterator[Problem]:
    if said is None or of_data is None:
        return
    if difference := of_data.difference(said, "the data", "this section"):
        remedy = "remove this section to use that of the data"
        yield Problem("vocab", f"differs from the vocabulary of the data: {difference}; {remedy}")


def _refuse(problems: list[Problem], document: Document) -> None:
    if problems:
        raise config_error(problems, document)


FEATURE = Vocabularies()


HERE = "training.meaningful_loss"


def move_meaningful_loss(document: Document, training: dict[str, Any]) -> None:
    """Move the settings to the section `loss`, in the document itself; settings that disable it stay.

    Raises ConfigError if the two ask for different losses.
    """
    given, loss = training.get("meaningful_loss"), document.data.get("loss") or {}
    loss = {"name": loss} if isinstance(loss, str) else loss
    if not isinstance(given, dict) or not isinstance(loss, dict):
        return  # validation reports it
    enabled = read_settings(given, HERE, document).get("enabled", True)
    name = loss.get("name", MEANINGFUL if enabled else None)
    if (name == MEANINGFUL) != enabled:
        says = f"asks for the loss '{MEANINGFUL}'" if enabled else "turns the meaningful loss off"
        raise ConfigError(f"{document.place(HERE)}: {says}, and loss.name is '{name}'; keep one")
    if not enabled:
        return
    training.pop("meaningful_loss")
    target = document.data["loss"] = {**loss, "name": MEANINGFUL}
    weights = {f"weights.{name}": weight for name, weight in (given.pop("weights", None) or {}).items()}
    for key, value in {**given, **weights}.items():
        if key.startswith((WEIGHT_OF, "weights.")):
            if value is not None:
                inside = target["weights"] = dict(target.get("weights") or {})
                name = key.removeprefix(WEIGHT_OF).removeprefix("weights.")
                _put(document, inside, value, key, "loss.weights", name)
        elif key != "enabled":
            _put(document, target, value, key, "loss", ALIASES.get(key, key))
    if "loss" not in document.locations:
        document.renamed(HERE, "loss")


def _put(document: Document, target: dict[str, Any], value: Any, key: str, section: str, name: str) -> None:
    """Set one argument of the loss, unless a later file has set it in the section."""
    spellings = (name, *(alias for alias, of in ALIASES.items() if of == name))
    put_setting(document, target, value, here=f"{HERE}.{key}", section=section, spellings=spellings, name=name)
