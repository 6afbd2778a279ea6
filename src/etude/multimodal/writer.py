"""MultimodalWriter: samples made of segments of several modalities, as token files with a type per token."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.core.errors import DataError
from etude.data.tokens.schema import TYPES
from etude.data.tokens.writer import TokenWriter
from etude.multimodal.tokenizers.base import as_whole_numbers
from etude.multimodal.vocab import VocabSpec

Segment = str | tuple[str, Any]
"""The name of a special token, or that of a modality with its codes."""


class MultimodalWriter:
    """Writes a token file of a vocabulary, one sample at a time (`add`) or many of one form (`add_rows`).

    A sample is a sequence of segments: the name of a special token, or (modality, codes). A code of -1 is a missing
    value: the token MISS, with the type of its modality, so that a model knows what is missing. The file has the
    stream `types` and records its vocabulary; it cannot be opened with another one. Types are those of
    `VocabSpec.types`, except for MISS, whose type is 0 there because its id does not show the modality.

    >>> import tempfile
    >>> import torch
    >>> from etude.multimodal.vocab import build_vocab_spec
    >>> from etude.data import open_tokens
    >>> vocab = build_vocab_spec(v_image=100, modalities={"period": 10})
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MultimodalWriter(Path(folder.name) / "train.bin", vocab) as writer:
    ...     writer.add(["BOS", ("period", 3), ("image", [0, 99]), "EOS"])
    ...     writer.add_rows(["BOS", ("period", torch.tensor([7, -1])), ("image", torch.zeros(2, 2).long())])
    >>> tokens = open_tokens(writer.path)
    >>> [sample.ids.tolist() for sample in tokens]
    [[2, 109, 6, 105, 3], [2, 113, 6, 6], [2, 1, 6, 6]]
    >>> tokens.read([5], [8], "types").tolist()
    [0, 2, 1, 1, 0, 2, 1, 1]
    >>> folder.cleanup()

    Arguments:
        sample_labels: labels of whole samples, and meta: facts of any kind, as of `TokenWriter`.
    """

    def __init__(
        self,
        path: str | Path,
        vocab: VocabSpec,
        *,
        sample_labels: Mapping[str, str | tuple[str, int]] = {},
        meta: Mapping[str, Any] = {},
    ) -> None:
        self.path, self.vocab = Path(path), vocab
        self._types = {name: number for number, name in enumerate(vocab.modalities, start=1)}
        facts = {"vocab_size": vocab.vocab_size, "num_types": vocab.num_types, "vocab": vocab.to_dict()}
        self._writer = TokenWriter(
            path,
            dtype="uint16" if vocab.vocab_size <= 2**16 else "uint32",
            streams={TYPES: "uint8" if vocab.num_types <= 2**8 else "uint16"},
            sample_labels=sample_labels,
            meta={**meta, **facts},
        )

    @property
    def num_samples(self) -> int:
        """Samples written so far."""
        return self._writer.num_samples

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._writer.num_tokens

    def add(self, segments: Sequence[Segment], *, labels: Mapping[str, ArrayLike] = {}) -> None:
        """Add one sample; the codes of a segment are a single code or a sequence."""
        parts = [self._segment(segment, rows=False) for segment in segments]
        ids = np.concatenate([np.zeros(0, np.int64), *(part for part, _ in parts)])
        self._writer.add(ids, streams={TYPES: _row_of_types(parts)}, labels=labels)

    def add_rows(self, segments: Sequence[Segment], *, labels: Mapping[str, ArrayLike] = {}) -> None:
        """Add N samples of one form: the codes of every segment are (N,) or (N, length), with N labels."""
        parts = [self._segment(segment, rows=True) for segment in segments]
        numbers = {len(codes) for codes, kind in parts if kind}  # special tokens have the type 0
        if len(numbers) != 1:
            found = " and ".join(map(str, sorted(numbers))) or "none"
            raise DataError(f"all segments need codes for the same number of samples, found {found}")
        number = numbers.pop()
        ids = np.concatenate([np.broadcast_to(part, (number, part.shape[1])) for part, _ in parts], axis=1)
        types = np.broadcast_to(_row_of_types(parts), ids.shape).reshape(-1)
        lengths = np.full(number, ids.shape[1])
        self._writer.add_many(ids.reshape(-1), lengths, streams={TYPES: types}, labels=labels)

    def close(self) -> None:
        """Finish the file and move it to its path. Without this call no file is created."""
        self._writer.close()

    def discard(self) -> None:
        """Cancel: remove what was written."""
        self._writer.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def _segment(self, segment: Segment, *, rows: bool) -> tuple[NDArray[np.int64], int]:
        """Return the token ids, (length,) or (N, length), and the type of a segment."""
        name, given = (segment, None) if isinstance(segment, str) else segment
        if given is None:
            if name not in self.vocab.special:
                why = "is a modality and needs codes" if name in self.vocab.modalities else "is not a special token"
                raise DataError(f"{name!r} {why}; special tokens are {', '.join(self.vocab.special)}")
            return np.full((1, 1) if rows else 1, self.vocab.special[name]), 0
        if name in self.vocab.special:
            raise DataError(f"{name!r} is a special token and has no codes; pass only its name")
        codes = as_whole_numbers(given, f"the codes of {name!r}").cpu()
        if codes.dim() not in ((1, 2) if rows else (0, 1)):
            shape = "(N,) or (N, length)" if rows else "one code or a row of them"
            raise DataError(f"the codes of {name!r} must be {shape}, found shape {tuple(codes.shape)}")
        codes = codes[..., None] if codes.dim() == (1 if rows else 0) else codes
        return self.vocab.encode(name, codes).numpy(), self._types[name]


def _row_of_types(parts: Sequence[tuple[NDArray[np.int64], int]]) -> NDArray[np.uint16]:
    """The types of the tokens of one sample."""
    kinds, lengths = np.array([kind for _, kind in parts], np.uint16), [ids.shape[-1] for ids, _ in parts]
    return np.repeat(kinds, np.array(lengths, np.int64))
