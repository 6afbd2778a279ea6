"""TokenFile: tokens, boundaries of samples, streams and labels of an open token file."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.core.errors import DataError
from etude.core.spelling import suggest
from etude.data.tokens.vectors import (
    AHEAD,
    CHUNK_BYTES,
    Array,
    Ints,
    Vector,
    as_indices,
    check_rows,
    largest_unsigned,
)

IGNORED = -100
"""The label of a token that has none."""

_BATCH = 4096


class Sample(NamedTuple):
    """A sample: its token ids, a mask of ones of the same length, and its labels."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    labels: Array
    """The sample's own label, else one label per token; otherwise the next token, -100 for the last."""


class Label(NamedTuple):
    """Labels of samples: a vector, and the number of values per sample (None: one, without a dimension)."""

    values: Vector
    width: int | None


class TokenFile:
    """Random access to the samples of a token file, by sample (`tokens[i]`) or many at once.

    Data is read only on access, and returned as a new array. Created by `open_tokens`. It can be pickled (it reopens
    the file) and used by several threads.
    """

    reopen: Callable[[], "TokenFile"]
    """Reopens the file; set by `open_tokens`."""

    def __init__(
        self,
        path: str,
        format: str,
        tokens: Vector,
        find_offsets: Callable[[], Vector] | None = None,
        *,
        meta: Mapping[str, Any] = {},
        streams: Mapping[str, Vector] = {},
        labels: Mapping[str, Label] = {},
        checksums: Mapping[str, tuple[Vector, int]] = {},
    ) -> None:
        self.path, self.format = path, format
        self.num_tokens, self.dtype = tokens.count, tokens.dtype
        self.meta: Mapping[str, Any] = MappingProxyType(dict(meta))
        self.vocab_size: int | None = meta.get("vocab_size")
        self.streams, self.sample_labels = tuple(streams), tuple(labels)
        self.vectors: dict[str | None, Vector] = {None: tokens, **dict[str | None, Vector](streams.items())}
        """The tokens (None) and the streams by name."""
        self.has_documents = find_offsets is not None
        """False if document boundaries are unknown: the file then counts as one document."""
        self.checksums = checksums
        """Sections of the file by name, with their expected CRC-32."""
        self._labels = labels
        self._find_offsets = find_offsets or (lambda: Vector(path, np.unique([0, tokens.count])))

    @cached_property
    def offsets(self) -> Vector:
        """Sample boundaries: sample i is from offset i to offset i + 1.

        In a file without them they are searched now.
        """
        return self._find_offsets()

    def cut_documents(self, delimiter: int, *, begins: bool) -> None:
        """Set the id that ends or begins documents; they are found by scanning all tokens once."""
        option = "document_start" if begins else "document_end"
        if self.has_documents:
            raise DataError(f"{self.path} is of {self.format} format, which has document boundaries; remove {option}")

        def find() -> Vector:
            tokens = self.vectors[None]
            found = [np.flatnonzero(values == delimiter) + position for position, values in tokens.chunks()]
            places = np.concatenate([np.zeros(0, np.int64), *found])
            if tokens.count and not places.size:
                raise DataError(
                    f"{self.path}: the id {delimiter} does not occur in it; set another {option}, or remove it"
                )
            edges = ([0], places if begins else places + 1, [tokens.count])
            return Vector(self.path, np.unique(np.concatenate(edges)))

        self.has_documents, self._find_offsets = True, find

    def __len__(self) -> int:
        return self.offsets.count - 1

    def __repr__(self) -> str:
        return f"TokenFile({self.path!r}, {self.format}, {self.num_tokens:,} tokens of {self.dtype.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.reopen, self.num_tokens)

    def __getitem__(self, index: int) -> Sample:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"{self.path} has {count:,} samples, there is no sample {index:,}")
        index = index % count
        starts, lengths = self.spans(np.array([index]))
        return self._sample(index, int(starts[0]), int(lengths[0]))

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples in order, in constant memory."""
        for first in range(0, len(self), _BATCH):
            starts, lengths = self.spans(np.arange(first, min(first + _BATCH, len(self))))
            behind = reached = int(starts[0])
            for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                if start + length > reached:
                    reached = start + length + AHEAD * CHUNK_BYTES // self.dtype.itemsize
                    for vector in self.vectors.values():
                        vector.slice(
                            start, reached
                        )  # of a remote file, all that is missing there is fetched together
                yield self._sample(first + number, start, length)
                if (start - behind) * self.dtype.itemsize > CHUNK_BYTES:
                    self.forget()
                    behind = start
            self.forget()

    def spans(self, indices: ArrayLike) -> tuple[Ints, Ints]:
        """Return starts and lengths of samples; raises DataError if they are not inside the file."""
        indices = as_indices(indices)
        if not indices.size:
            return indices.copy(), indices.copy()
        if largest_unsigned(indices) >= len(self):
            bad = indices[(indices < 0) | (indices >= len(self))][0]
            raise DataError(f"{self.path} has {len(self):,} samples, there is no sample {int(bad):,}")
        starts, stops = self.offsets.take(indices), self.offsets.take(indices + 1)
        lengths = stops - starts
        # The bitwise or of two numbers is negative if one of them is.
        if int(np.maximum.reduce(stops)) > self.num_tokens or int(np.minimum.reduce(starts | lengths)) < 0:
            bad = indices[(starts < 0) | (lengths < 0) | (stops > self.num_tokens)][0]
            raise DataError(f"{self.path} is damaged: sample {int(bad):,} is not inside it; create or copy it again")
        return starts, lengths

    def lengths(self, indices: ArrayLike | None = None) -> Ints:
        """Return the lengths of samples, of all of them by default."""
        if indices is not None:
            return self.spans(indices)[1]
        result = np.empty(len(self), np.int64)
        for first in range(0, len(self), 2**20):
            part = result[first : first + 2**20]
            part[:] = self.spans(np.arange(first, first + len(part)))[1]
            self.forget()
        return result

    def rows(self, starts: ArrayLike, length: int, stream: str | None = None) -> Array:
        """Return `length` tokens, or values of a stream, from each start: a new (n, length) array."""
        return self._vector(stream).rows(as_indices(starts), length)

    def read(self, starts: ArrayLike, lengths: ArrayLike, stream: str | None = None) -> Array:
        """Return concatenated spans: a new array as long as all lengths together."""
        vector = self._vector(stream)
        starts, lengths = as_indices(starts), as_indices(lengths)
        if starts.shape != lengths.shape:
            raise DataError(f"found {len(starts):,} starts and {len(lengths):,} lengths; there must be one of each")
        stops = starts + lengths
        if stops.size and (
            int(np.maximum.reduce(stops)) > vector.count or int(np.minimum.reduce(starts | lengths | stops)) < 0
        ):
            bad = np.flatnonzero((starts < 0) | (lengths < 0) | (lengths > vector.count - starts))[0]
            raise DataError(
                f"{self.path} has {vector.count:,} tokens; a span of {int(lengths[bad]):,} from {int(starts[bad]):,} "
                "is not within them"
            )
        return vector.spans(starts, lengths)

    def document_at(self, positions: ArrayLike) -> Ints:
        """Return the number of the sample that holds the token at each position."""
        positions = as_indices(positions)
        check_rows(self.path, positions, 1, self.num_tokens)
        samples = np.minimum(self.offsets.search(positions), len(self)) - 1
        if samples.size:
            starts, lengths = self.spans(np.clip(samples, 0, max(len(self) - 1, 0)))
            if bool(np.any((positions < starts) | (positions >= starts + lengths))):
                raise DataError(f"{self.path} is damaged: its samples are not in order; create or copy it again")
        return samples

    def label(self, name: str, indices: ArrayLike) -> Array:
        """Return the labels of some samples without reading others, (n,) or (n, width)."""
        if name not in self._labels:
            raise DataError(f"{self.path} has no label {name!r}{suggest(name, self._labels)}")
        indices, (values, width) = as_indices(indices), self._labels[name]
        if largest_unsigned(indices) >= max(len(self), 1) or (indices.size and not len(self)):
            raise DataError(f"{self.path} has {len(self):,} samples; there is no such sample")
        return values.take(indices) if width is None else values.rows(indices * width, width)

    def forget(self) -> None:
        """Release the memory made resident by reading sequentially."""
        self.vectors[None].forget()  # everything else is in the same file

    def _vector(self, stream: str | None) -> Vector:
        if stream not in self.vectors:
            raise DataError(f"{self.path} has no stream {stream!r}{suggest(str(stream), self.streams)}")
        return self.vectors[stream]

    def _sample(self, index: int, start: int, length: int) -> Sample:
        ids = self.vectors[None].slice(start, start + length).astype(np.int64)
        own = next((name for name in ("label", "labels") if name in self._labels), None)
        if own is not None:
            labels = self.label(own, [index])[0, ...]
        elif "labels" in self.vectors:
            labels = self.vectors["labels"].slice(start, start + length).astype(np.int64)
        else:
            labels = np.append(ids[1:], IGNORED)[:length]
        return Sample(ids, np.ones(length, np.int64), labels)


def _reopened(reopen: Callable[[], TokenFile], num_tokens: int) -> TokenFile:
    file = reopen()
    if file.num_tokens != num_tokens:
        raise DataError(
            f"{file.path} has changed: {file.num_tokens:,} tokens, {num_tokens:,} when it was first opened"
        )
    return file
