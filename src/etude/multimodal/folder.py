"""A folder of multimodal data: vocab.json, tokenizers/<modality>.safetensors, and the token files of its splits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from etude.core.errors import DataError
from etude.data.tokens.places import exists, is_remote, local_copy, local_path
from etude.multimodal.tokenizers.loading import Tokenizer, load_tokenizer
from etude.multimodal.tokenizers.scalar import ScalarTokenizer
from etude.multimodal.tokenizers.storing import SUFFIX
from etude.multimodal.vocab import VocabSpec

VOCAB_FILE = "vocab.json"
TOKENIZERS = "tokenizers"


@dataclass(frozen=True)
class Modalities:
    """A vocabulary, and the tokenizers of those modalities that have one; DataError if their sizes differ."""

    vocab: VocabSpec
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            if name not in self.vocab.modalities:
                known = ", ".join(self.vocab.modalities) or "none"
                raise DataError(
                    f"there is a tokenizer for {name!r}, which is no modality of the vocabulary ({known})"
                )
            size = self.vocab.range_of(name).size
            if tokenizer.size != size:
                raise DataError(
                    f"the tokenizer of {name!r} has {tokenizer.size} codes, the vocabulary {size}; "
                    f"build the vocabulary with the sizes of the fitted tokenizers"
                )

    @property
    def codebooks(self) -> dict[str, Tensor]:
        """What the codes of modalities stand for: centres (V,) or centroids (V, D)."""
        return {name: tokenizer.values for name, tokenizer in self.tokenizers.items()}

    @property
    def edges(self) -> dict[str, Tensor]:
        """The edges (V + 1,) of the bins of scalars."""
        tokenizers = self.tokenizers.items()
        return {name: tokenizer.edges for name, tokenizer in tokenizers if isinstance(tokenizer, ScalarTokenizer)}

    def equals(self, other: "Modalities | None") -> bool:
        """Return whether ids and codes mean the same in both."""
        if other is None or self.vocab != other.vocab or self.tokenizers.keys() != other.tokenizers.keys():
            return False
        books, edges = other.codebooks, other.edges
        return self.edges.keys() == edges.keys() and all(
            torch.equal(mine, theirs)
            for own, others in ((self.codebooks, books), (self.edges, edges))
            for mine, theirs in ((own[name], others[name]) for name in own)
        )


def write_modalities(folder: str | Path, vocab: VocabSpec, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Write the vocabulary and the tokenizers of a folder; its token files are written by `MultimodalWriter`.

    A modality whose codes stand for no numbers, such as classes, has no tokenizer. Raises DataError if sizes differ.
    """
    Modalities(vocab, tokenizers)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tokenizer in tokenizers.items():
            tokenizer.save(folder / TOKENIZERS / f"{name}{SUFFIX}")
        vocab.save(folder / VOCAB_FILE)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error


def has_vocabulary(root: str | Path) -> bool:
    """Return whether a folder or URL is one of multimodal data: it has a vocab.json."""
    return exists(f"{_base(root)}/{VOCAB_FILE}")


def read_modalities(root: str | Path) -> Modalities:
    """Return the vocabulary and the tokenizers of a folder or URL; DataError if they are missing or do not fit."""
    base = _base(root)
    if not has_vocabulary(root):
        raise DataError(f"{root} has no {VOCAB_FILE}; write it with write_modalities")
    vocab = VocabSpec.load(local_copy(f"{base}/{VOCAB_FILE}"))
    places = {name: f"{base}/{TOKENIZERS}/{name}{SUFFIX}" for name in vocab.modalities}
    if not is_remote(base):  # what belongs to no modality is a mistake, in a folder that can be listed
        found = sorted((local_path(base) / TOKENIZERS).glob(f"*{SUFFIX}"))
        places |= {path.name.removesuffix(SUFFIX): str(path) for path in found}
    return Modalities(vocab, {n: load_tokenizer(local_copy(place)) for n, place in places.items() if exists(place)})


def _base(root: str | Path) -> str:
    return str(root).rstrip("/") if "://" in str(root) else str(Path(root).expanduser())
