"""A folder of multimodal data: vocab.json, tokenizers and token files, and what checkpoints keep about them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.core.errors import CheckpointError, ConfigError, DataError
from etude.data.tokens.file import TokenFile
from etude.data.tokens.places import exists, is_remote, local_copy, local_path
from etude.data.tokens.schema import TokenSchema, folder_of
from etude.multimodal.tokenizers import Tokenizer, load_tokenizer
from etude.multimodal.tokenizers.base import SUFFIX
from etude.multimodal.tokenizers.scalar import ScalarTokenizer
from etude.multimodal.vocab import VocabSpec

VOCAB_FILE = "vocab.json"
TOKENIZERS = "tokenizers"


@dataclass(frozen=True)
class Modalities(TokenSchema):
    """A vocabulary, and the tokenizers of modalities that have one; DataError if their sizes differ."""

    vocab: VocabSpec
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            if name not in self.vocab.modalities:
                known = ", ".join(self.vocab.modalities) or "none"
                raise DataError(
                    f"there is a tokenizer for {name!r}, which is not a modality of the vocabulary ({known})"
                )
            size = self.vocab.range_of(name).size
            if tokenizer.size != size:
                raise DataError(
                    f"the tokenizer of {name!r} has {tokenizer.size} codes, the vocabulary {size}; "
                    f"build the vocabulary with the sizes of the fitted tokenizers"
                )

    @property
    def codebooks(self) -> dict[str, Tensor]:
        """The values of codes by modality: centres (V,) or centroids (V, D)."""
        return {name: tokenizer.values for name, tokenizer in self.tokenizers.items()}

    @property
    def edges(self) -> dict[str, Tensor]:
        """The edges (V + 1,) of the bins of scalars."""
        tokenizers = self.tokenizers.items()
        return {name: tokenizer.edges for name, tokenizer in tokenizers if isinstance(tokenizer, ScalarTokenizer)}

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self.vocab.vocab_size

    @property
    def num_types(self) -> int:
        """Number of token types: one for special tokens and one per modality."""
        return self.vocab.num_types

    @property
    def pad_id(self) -> int:
        """The id of PAD."""
        return self.vocab.pad_id

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The special tokens."""
        return self.vocab.special

    def check(self, file: TokenFile) -> None:
        """Raise DataError if a file has another vocabulary, or ids outside the vocabulary.

        A file that records neither its vocabulary nor its size is read once completely, unless it is remote.
        """
        written_for = file.meta.get("vocab")
        if written_for is not None:
            if written_for != self.vocab.to_dict():
                raise DataError(
                    f"{file.path} was written for another vocabulary than {VOCAB_FILE} beside it; write it again"
                )
        elif (found := _limit(file)) is not None and found > self.vocab_size:
            raise DataError(
                f"{file.path} has ids up to {found - 1:,}, but {VOCAB_FILE} beside it has {self.vocab_size:,} "
                "tokens; use the vocabulary of the file"
            )

    def difference(self, other: TokenSchema, here: str = "the first", there: str = "the second") -> str | None:
        """Return the first difference in vocabularies, tokenizers, bin edges and values, which must be the same."""
        if not isinstance(other, Modalities):
            return f"{there} has no {VOCAB_FILE}"
        if found := self.vocab.difference(other.vocab, here, there):
            return found
        mine, theirs = self.facts(), other.facts()
        for key, what in (("codebooks", "codebook"), ("edges", "bin edges")):
            for one, another, names in ((mine, theirs, (here, there)), (theirs, mine, (there, here))):
                if found := difference_of(what, one[key], another[key], *names):
                    return found
        return None

    def facts(self) -> dict[str, Any]:
        """Return the vocabulary, and the checksums of codebooks and bins."""
        return describe_vocabulary(self.vocab, self.codebooks, self.edges)

    def check_facts(self, saved: Mapping[str, Any], place: object) -> None:
        """Raise CheckpointError if a checkpoint has another vocabulary or other codebooks."""
        check_vocabulary(saved, self.facts(), place)


def describe_vocabulary(
    vocab: VocabSpec, codebooks: Mapping[str, Tensor], edges: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Return the data about a vocabulary for checkpoints; `VocabSpec.from_dict(meta["vocab"])` restores it.

    >>> from etude.multimodal.vocab import build_vocab_spec
    >>> facts = describe_vocabulary(build_vocab_spec(v_scalar=2), {"scalar": torch.tensor([0.0, 1.0])})
    >>> facts["config"], facts["codebooks"]["scalar"]["shape"]
    ({'vocab_size': 8, 'base_image': None, 'base_scalar': 6, 'base_spectrum': None}, [2])
    """
    bases = {
        f"base_{name}": vocab.modalities[name].base if name in vocab.modalities else None
        for name in ("image", "scalar", "spectrum")
    }
    return {
        "vocab": vocab.to_dict(),
        "codebooks": {name: _print_of(values) for name, values in codebooks.items()},
        "edges": {name: _print_of(torch.as_tensor(values)) for name, values in edges.items()},
        "config": {"vocab_size": vocab.vocab_size, **bases},
    }


def check_vocabulary(saved: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise CheckpointError if a checkpoint's vocabulary or codebooks differ from those of a run.

    `saved` and `now` are the data of the checkpoint and of the run, including that of `describe_vocabulary`. Nothing
    is compared if one of them has no vocabulary, or if users store something else under these names. A codebook that
    only the checkpoint has is refused; bin edges are compared if both have them.
    """
    try:
        before, after = (VocabSpec.from_dict(facts["vocab"]) for facts in (saved, now))
    except (ConfigError, KeyError):
        return
    here, there = "the checkpoint", "this run"
    difference = (
        before.difference(after, here, there)
        or difference_of("codebook", saved.get("codebooks"), now.get("codebooks"), here, there)
        or difference_of("bin edges", saved.get("edges"), now.get("edges"), here, there, optional=True)
    )
    if difference:
        raise CheckpointError(
            f"{place} has another vocabulary, so its tokens would mean something else: {difference}; use the "
            "vocabulary of the checkpoint"
        )


def difference_of(what: str, one: Any, other: Any, here: str, there: str, *, optional: bool = False) -> str | None:
    """Return the first difference in codebooks or edges; those of `one` must be in `other` too."""
    before, after = (
        {name: seal for name, seal in (facts or {}).items() if isinstance(seal, Mapping) and "sha256" in seal}
        for facts in (one, other)
    )
    for name, seal in before.items():
        if name not in after and not optional:
            return f"the {what} of '{name}' is only in {here}"
        if name in after and seal != after[name]:
            old, new = (tuple(one["shape"]) for one in (seal, after[name]))
            how = f"shape {old} in {here}, {new} in {there}" if old != new else "other values"
            return f"the {what} of '{name}' has {how}"
    return None


def _print_of(values: Tensor) -> dict[str, Any]:
    """Return shape and checksum of a codebook, independent of its device and dtype."""
    plain = values.detach().to("cpu", torch.float32).contiguous()
    plain = plain[:, 0] if plain.dim() == 2 and plain.shape[1] == 1 else plain
    return {"shape": list(plain.shape), "sha256": hashlib.sha256(plain.numpy().tobytes()).hexdigest()}


def write_modalities(folder: str | Path, vocab: VocabSpec, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Write the vocabulary and the tokenizers of a folder; its token files are written by `MultimodalWriter`.

    A modality whose codes do not represent numbers, such as classes, has no tokenizer. Raises DataError if sizes
    differ.
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


def read_modalities(root: str | Path) -> Modalities:
    """Return the vocabulary and the tokenizers of a folder or URL; DataError if they are missing or do not fit."""
    base = folder_of(root)
    if not exists(f"{base}/{VOCAB_FILE}"):
        raise DataError(f"{root} has no {VOCAB_FILE}; write it with write_modalities")
    vocab = VocabSpec.load(local_copy(f"{base}/{VOCAB_FILE}"))
    places = {name: f"{base}/{TOKENIZERS}/{name}{SUFFIX}" for name in vocab.modalities}
    if not is_remote(base):  # a file that belongs to no modality is an error, if the folder can be listed
        found = sorted((local_path(base) / TOKENIZERS).glob(f"*{SUFFIX}"))
        places |= {path.name.removesuffix(SUFFIX): str(path) for path in found}
    return Modalities(vocab, {n: load_tokenizer(local_copy(place)) for n, place in places.items() if exists(place)})


read_schema = read_modalities
"""How `etude.data` reads such a folder."""


def refuse_without_schema(file: TokenFile) -> None:
    """Raise DataError if a file was written for several modalities: without vocab.json it would be read as text."""
    if "modalities" in file.meta["vocab"]:
        raise DataError(
            f"{file.path} was written for several modalities, but there is no {VOCAB_FILE} beside it; "
            f"copy it there with the folder {TOKENIZERS}, or write both with write_modalities"
        )


def _limit(file: TokenFile) -> int | None:
    """Upper bound of all ids of a file; None if unknown."""
    if file.vocab_size is not None or is_remote(file.path):
        return file.vocab_size
    return 1 + max((int(ids.max()) for _, ids in file.vectors[None].chunks()), default=-1)
