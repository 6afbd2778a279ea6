"""check_tokens: reads a whole token file in constant memory, and reports its contents or damage."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import TokenFile
from etude.data.tokens.opening import open_tokens

_BATCH = 2**16


@dataclass(frozen=True)
class TokenReport:
    """The contents of a token file, found by reading all of it."""

    path: str
    format: str
    dtype: str
    num_tokens: int
    num_samples: int
    shortest: int
    longest: int
    mean_length: float
    largest_id: int | None
    """The largest id that occurs; None in a file without tokens."""
    vocab_size: int | None
    streams: tuple[str, ...]
    sample_labels: tuple[str, ...]
    checksums: bool
    """True if all checksums were verified; False if the format has none."""


def check_tokens(path: str | Path, **options: Any) -> TokenReport:
    """Read a whole token file and verify it: checksums, boundaries of samples, ids below the vocabulary size.

    Accepts the options of `open_tokens`. Raises DataError with the problem.
    """
    file = open_tokens(path, **options)
    _check_sums(file)
    largest = _check_ids(file)
    shortest, longest = _check_spans(file)
    return TokenReport(
        path=file.path,
        format=file.format,
        dtype=file.dtype.name,
        num_tokens=file.num_tokens,
        num_samples=len(file),
        shortest=shortest,
        longest=longest,
        mean_length=file.num_tokens / max(len(file), 1),
        largest_id=largest,
        vocab_size=file.vocab_size,
        streams=file.streams,
        sample_labels=file.sample_labels,
        checksums=bool(file.checksums),
    )


def _check_sums(file: TokenFile) -> None:
    for name, (vector, expected) in file.checksums.items():
        found = 0
        for _, values in vector.chunks():
            found = zlib.crc32(values.data, found)
        if found != expected:
            raise DataError(
                f"{file.path} is damaged: its {name} do not match their checksum; create or copy it again"
            )


def _check_ids(file: TokenFile) -> int | None:
    """Return the largest id; refuse negative ones, and ids outside the vocabulary."""
    limit = file.vocab_size if file.vocab_size is not None else 2**32
    largest = None
    for position, ids in file.vectors[None].chunks():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            bad = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            allowed = f"a vocabulary of {limit:,}" if file.vocab_size is not None else "ids"
            raise DataError(
                f"{file.path}: token {position + bad:,} is {int(ids[bad]):,}, outside {allowed}; check its "
                "vocabulary and dtype"
            )
        largest = high if largest is None else max(largest, high)
    return largest


def _check_spans(file: TokenFile) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest sample; the scan also finds those outside the file."""
    shortest, longest, count = file.num_tokens, 0, len(file)
    for first in range(0, count, _BATCH):
        _, lengths = file.spans(np.arange(first, min(first + _BATCH, count)))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        file.forget()
    return shortest, longest
