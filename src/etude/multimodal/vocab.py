"""The vocabulary of a model over several modalities: special tokens, then one contiguous id range per modality.

PAD MISS BOS EOS SEP MASK | image: 6 … 2053 | scalar: 2054 … 2565 | spectrum: 2566 … 3589
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.errors import ConfigError, DataError
from etude.core.files import write_text
from etude.core.spelling import listed, suggest
from etude.multimodal.tokenizers.base import as_codes

PAD, MISS = "PAD", "MISS"
SPECIAL = (PAD, MISS, "BOS", "EOS", "SEP", "MASK")
"""The default special tokens: padding, a missing value, and others for free use."""


@dataclass(frozen=True, slots=True)
class Modality:
    """A contiguous range of token ids for values of one kind."""

    name: str
    base: int
    """The first id."""
    size: int

    @property
    def stop(self) -> int:
        """The id after the last one."""
        return self.base + self.size

    @property
    def slice(self) -> slice:
        """Its rows of an output layer."""
        return slice(self.base, self.stop)


@dataclass(frozen=True)
class VocabSpec:
    """Special tokens and modalities by name; raises ConfigError for duplicate ids or overlapping ranges.

    >>> vocab = build_vocab_spec(v_image=100, v_scalar=10, modalities={"class": 3})
    >>> vocab.vocab_size, vocab.base_image, vocab.range_of("class")
    (119, 6, Modality(name='class', base=116, size=3))
    >>> vocab.encode("scalar", torch.tensor([0, 9, -1]))
    tensor([106, 115,   1])
    >>> vocab.types(torch.tensor([0, 6, 106, 118]))
    tensor([0, 1, 2, 3])
    """

    special: Mapping[str, int]
    """The id of every special token; PAD and MISS are always among them."""
    modalities: Mapping[str, Modality]
    """In the order of their ids."""
    vocab_size: int = field(init=False)
    """One more than the largest id."""

    def __post_init__(self) -> None:
        _check(self.special, self.modalities)
        modalities = dict(sorted(self.modalities.items(), key=lambda item: item[1].base))
        last = max((*self.special.values(), *(modality.stop - 1 for modality in modalities.values())))
        object.__setattr__(self, "special", dict(self.special))
        object.__setattr__(self, "modalities", modalities)
        object.__setattr__(self, "vocab_size", last + 1)

    def __hash__(self) -> int:
        """Return a hash of names and ids; equal vocabularies have the same hash, independent of order."""
        return hash((frozenset(self.special.items()), frozenset(self.modalities.values())))

    @property
    def pad_id(self) -> int:
        """The id of padding; it is never trained on."""
        return self.special[PAD]

    @property
    def miss_id(self) -> int:
        """The id of a missing value."""
        return self.special[MISS]

    @property
    def base_image(self) -> int:
        """The first id of the modality `image`."""
        return self.range_of("image").base

    @property
    def base_scalar(self) -> int:
        """The first id of the modality `scalar`."""
        return self.range_of("scalar").base

    @property
    def base_spectrum(self) -> int:
        """The first id of the modality `spectrum`."""
        return self.range_of("spectrum").base

    @property
    def num_types(self) -> int:
        """The number of types that `types` distinguishes: one for special tokens and one per modality."""
        return 1 + len(self.modalities)

    def range_of(self, name: str) -> Modality:
        """Return a modality by name; raise ConfigError for an unknown name."""
        if name not in self.modalities:
            raise ConfigError(f"the vocabulary has no modality {name!r}{suggest(name, self.modalities)}")
        return self.modalities[name]

    def encode(self, name: str, codes: Tensor) -> Tensor:
        """Return the token ids of a modality's codes 0 … size-1; a code of -1 is a missing value, MISS.

        Raises DataError for other codes out of range. Synchronises with the device.
        """
        modality = self.range_of(name)
        codes = as_codes(codes, modality.size, f"codes of the modality {name!r}")
        return torch.where(codes < 0, self.miss_id, codes + modality.base)

    def decode(self, name: str, tokens: Tensor) -> Tensor:
        """Return the codes of a modality's token ids, and -1 for all other ids.

        >>> build_vocab_spec(v_scalar=10).decode("scalar", torch.tensor([1, 6, 15, 3]))
        tensor([-1,  0,  9, -1])
        """
        modality = self.range_of(name)
        tokens = tokens.long()
        inside = (tokens >= modality.base) & (tokens < modality.stop)
        return torch.where(inside, tokens - modality.base, -1)

    def types(self, tokens: Tensor) -> Tensor:
        """Return the type of every token: 0 for special tokens, 1 for the first modality, and so on.

        MISS is a special token here, of type 0: its id does not show which modality is missing. `MultimodalWriter`,
        which knows it, gives MISS the type of its modality.
        """
        tokens = tokens.long()
        result = torch.zeros_like(tokens)
        for place, modality in enumerate(self.modalities.values(), start=1):
            result = torch.where((tokens >= modality.base) & (tokens < modality.stop), place, result)
        return result

    def difference(self, other: "VocabSpec", here: str = "the first", there: str = "the second") -> str | None:
        """Return the first difference of two vocabularies, None if there is none; `here` and `there` name them.

        >>> build_vocab_spec(v_image=8).difference(build_vocab_spec(v_image=4), "the data", "the section")
        "modality 'image' has 8 tokens from id 6 in the data, 4 tokens from id 6 in the section"
        """
        for noun, own, others in (
            ("special token", self.special, other.special),
            ("modality", self.modalities, other.modalities),
        ):
            for name in dict.fromkeys([*own, *others]):
                if name not in own or name not in others:
                    return f"{noun} '{name}' is only in {here if name in own else there}"
                if own[name] != others[name]:
                    return f"{noun} '{name}' has {_place(own[name])} in {here}, {_place(others[name])} in {there}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the vocabulary as plain data.

        >>> vocab = build_vocab_spec(v_image=4)
        >>> VocabSpec.from_dict(vocab.to_dict()) == vocab
        True
        """
        return {
            "special": dict(self.special),
            "modalities": {m.name: {"base": m.base, "size": m.size} for m in self.modalities.values()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "VocabSpec":
        """Return the vocabulary that `to_dict` described; raise ConfigError for anything else."""
        try:
            modalities = {name: Modality(name, one["base"], one["size"]) for name, one in data["modalities"].items()}
            special = dict(data["special"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                'this is not a vocabulary: expected {"special": {name: id, …}, '
                '"modalities": {name: {"base": …, "size": …}, …}}'
            ) from error
        return cls(special, modalities)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary as JSON, atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "VocabSpec":
        """Read a file written by `save`; raise DataError if it is missing or holds something else."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); it should describe a vocabulary") from error
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, ConfigError) else f"not JSON ({error})"
            raise DataError(f"{path}: {why}") from error


def build_vocab_spec(
    v_image: int | None = None,
    v_scalar: int | None = None,
    v_spectra: int | None = None,
    *,
    modalities: Mapping[str, int] | None = None,
    special: Sequence[str] = SPECIAL,
) -> VocabSpec:
    """Return a vocabulary: the special tokens from id 0 on, then the modalities without gaps.

    `v_image`, `v_scalar` and `v_spectra` are the sizes of the modalities `image`, `scalar` and `spectrum`; any others
    follow by name in `modalities`. PAD and MISS must be among the special tokens. Raises ConfigError for sizes below 1
    and for names given twice.

    >>> build_vocab_spec(v_image=2048, v_scalar=512, v_spectra=1024).vocab_size
    3590
    >>> build_vocab_spec(modalities={"period": 64, "class": 8}, special=("PAD", "MISS")).range_of("class").base
    66
    """
    named = {"image": v_image, "scalar": v_scalar, "spectrum": v_spectra}
    sizes: dict[str, Any] = {name: size for name, size in named.items() if size is not None}
    if twice := [name for name in modalities or {} if name in sizes]:
        raise ConfigError(f"the size of the modality {twice[0]!r} is given twice; keep one")
    if twice := [name for place, name in enumerate(special) if name in special[:place]]:
        raise ConfigError(f"the special token {twice[0]!r} is given twice; keep one")
    ranges: dict[str, Modality] = {}
    base = len(special)
    for name, size in {**sizes, **(modalities or {})}.items():
        size = int(size) if isinstance(size, np.integer) else size
        _check_whole(size, f"the size of the modality {name!r}", 1)
        ranges[name] = Modality(name, base, size)
        base += size
    return VocabSpec({name: place for place, name in enumerate(special)}, ranges)


def _place(token: "int | Modality") -> str:
    return f"id {token}" if isinstance(token, int) else f"{token.size} tokens from id {token.base}"


def _check(special: Mapping[str, int], modalities: Mapping[str, Modality]) -> None:
    """Raise ConfigError unless all names are valid and every id is unique."""
    if missing := [name for name in (PAD, MISS) if name not in special]:
        raise ConfigError(
            f"the special tokens must include {' and '.join(missing)}; there are {listed(map(str, special))}"
        )
    for name, modality in modalities.items():
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier() or not name[0].isalpha():
            raise ConfigError(
                f"a modality is named {name!r}; use letters, digits, '_' and '-', and begin with a letter"
            )
        if name in special or name != modality.name:
            raise ConfigError(f"the name {name!r} or {modality.name!r} is used twice; rename the modality")
        _check_whole(modality.size, f"the size of the modality {name!r}", 1)
    ranges = [*(Modality(name, token, 1) for name, token in special.items()), *modalities.values()]
    for one in ranges:
        if not isinstance(one.name, str):
            raise ConfigError(f"a special token is called {one.name!r}; names are text")
        _check_whole(one.base, f"the first id of {one.name!r}", 0)
    for first, second in pairwise(sorted(ranges, key=lambda one: one.base)):
        if second.base < first.stop:
            raise ConfigError(
                f"{first.name!r} ({first.base} … {first.stop - 1}) and {second.name!r} ({second.base} … "
                f"{second.stop - 1}) overlap; change one of them"
            )


def _check_whole(value: Any, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} is {value!r}; it must be an integer of at least {least}")
