"""check_tokens: reads a whole token file, in constant memory, and says what it holds or what is wrong with it."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.errors import DataError
from etude.data.tokens.file import TokenFile
from etude.data.tokens.opening import open_tokens
from etude.data.tokens.vectors import chunks

_BATCH = 2**16


@dataclass(frozen=True)
class TokenReport:
    """What a token file holds, found by reading all of it."""

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
    is_dtype_assumed: bool
    """True if the file does not say its dtype and neither did the caller: the ids decided."""
    checksums: bool
    """True if all checksums were verified; False if the format has none."""


def check_tokens(path: str | Path, **options: Any) -> TokenReport:
    """Read a whole token file and verify it: checksums, boundaries of samples, ids below the vocabulary size.

    Takes the options of `open_tokens`. Raises DataError that says what is wrong.
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
        is_dtype_assumed=file.format == "flat" and options.get("dtype") is None,
        checksums=bool(file.checksums),
    )


def _check_sums(file: TokenFile) -> None:
    for name, (vector, expected) in file.checksums.items():
        found = 0
        for _, values in chunks(vector):
            found = zlib.crc32(values.data, found)
        if found != expected:
            what = {"tokens": "its tokens do", "index": "its index does"}.get(name, f"its section {name!r} does")
            raise DataError(
                f"{file.path} is damaged: {what} not have the checksum written with it ({found:08x}, expected "
                f"{expected:08x}); make or copy it again"
            )


def _check_ids(file: TokenFile) -> int | None:
    """Return the largest id; refuse negative ones, and ids outside the vocabulary."""
    limit = file.vocab_size if file.vocab_size is not None else 2**32
    largest = None
    for position, ids in chunks(file.vectors[None]):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            bad = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            allowed = f"a vocabulary of {limit:,}" if file.vocab_size is not None else "ids"
            raise DataError(
                f"{file.path}: token {position + bad:,} is {int(ids[bad]):,}, outside {allowed}; it was made for "
                "another vocabulary, or is of another dtype"
            )
        largest = high if largest is None else max(largest, high)
    return largest


def _check_spans(file: TokenFile) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest sample; all must follow one another, from 0 to the end."""
    file.boundaries.check()
    reached, shortest, longest, count = 0, file.num_tokens, 0, len(file)
    for first in range(0, count, _BATCH):
        starts, lengths = file.spans(np.arange(first, min(first + _BATCH, count)))
        if int(starts[0]) != reached or bool(np.any(starts[1:] != starts[:-1] + lengths[:-1])):
            raise DataError(f"{file.path} is damaged: its samples do not follow one another; make or copy it again")
        file.forget()
        reached = int(starts[-1] + lengths[-1])
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    if reached != file.num_tokens:
        raise DataError(f"{file.path} is damaged: its samples end at {reached:,} of {file.num_tokens:,} tokens")
    return shortest, longest
