"""TokenWriter: token files written as a stream, in constant memory, and created atomically."""

import contextlib
import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.core.errors import DataError
from etude.core.files import NewFile
from etude.data.tokens.layout import (
    ALIGNMENT,
    PREAMBLE_BYTES,
    FileSection,
    Kind,
    declaration_problem,
    encode_header,
    encode_meta,
    encode_preamble,
)

_PIECE = 2**17  # values validated, converted and written at a time: they fit the processor's cache
_BUFFER = 2**20


class TokenWriter:
    """Writes a token file, sample by sample (`add`) or many at once (`add_many`).

    A sample is a sequence of token ids with the declared values: one per token for each of `streams`, one (or
    `width`) per sample for each of `sample_labels`. `meta` holds any JSON data; ids are checked against its
    `vocab_size`. The same input gives the same bytes. After an error in the `with` block no file is left.

    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "train.bin"
    >>> with TokenWriter(path, sample_labels={"label": "int8"}, meta={"vocab_size": 10}) as writer:
    ...     writer.add([1, 2, 3], labels={"label": 1})
    ...     writer.add_many([4, 5, 6, 7], lengths=[1, 3], labels={"label": [0, 1]})
    >>> from etude.data.tokens.opening import open_tokens
    >>> tokens = open_tokens(path)
    >>> len(tokens), tokens.num_tokens, tokens[2].ids.tolist(), int(tokens[2].labels)
    (3, 7, [5, 6, 7], 1)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "uint16",
        streams: Mapping[str, str] = {},
        sample_labels: Mapping[str, str | tuple[str, int]] = {},
        meta: Mapping[str, Any] = {},
    ) -> None:
        self.path = Path(path)
        self.num_tokens = self.num_samples = 0
        self._meta = encode_meta(meta)
        vocab_size: int | None = self._meta.get("vocab_size")
        self._parts = _declare(dtype, vocab_size, streams, sample_labels)
        if vocab_size is not None and vocab_size > int(np.iinfo(dtype).max) + 1:
            raise DataError(f"a vocabulary of {vocab_size:,} does not fit {dtype}; use dtype='uint32'")
        with self._telling_of_the_disk():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._new = NewFile(self.path, buffering=_BUFFER)
            self._file = self._new.file
            self._file.write(bytes(PREAMBLE_BYTES))
            self._parts["tokens"].file = self._file
            # unnamed temporary files: they are removed however the program ends
            for name in self._parts.keys() - {"tokens"}:
                self._parts[name].file = tempfile.TemporaryFile(dir=self.path.parent, buffering=_BUFFER)  # noqa: SIM115
            self._parts["index"].write(np.zeros(1, np.uint64))

    def add(
        self, ids: ArrayLike, *, streams: Mapping[str, ArrayLike] = {}, labels: Mapping[str, ArrayLike] = {}
    ) -> None:
        """Add one sample."""
        ids = np.asarray(ids)
        rows = {name: np.asarray(value)[None] for name, value in labels.items()}
        self.add_many(ids, [ids.size], streams=streams, labels=rows)

    def add_many(
        self,
        ids: ArrayLike,
        lengths: ArrayLike,
        *,
        streams: Mapping[str, ArrayLike] = {},
        labels: Mapping[str, ArrayLike] = {},
    ) -> None:
        """Add many samples, with their ids concatenated."""
        if self._file.closed:
            raise DataError(f"{self.path} is already written; open another TokenWriter to write more")
        ids, lengths = np.asarray(ids), np.asarray(lengths)
        for kind, values in (("stream", streams), ("label", labels)):
            declared = {name for name, part in self._parts.items() if part.kind == kind}
            if values.keys() != declared:
                found, allowed = (", ".join(sorted(names)) or "none" for names in (values.keys(), declared))
                raise DataError(f"every sample must have the declared {kind}s ({allowed}), found {found}")
        given = {"tokens": ids, "index": lengths, **streams, **labels}
        counts = {"tokens": ids.size, "stream": ids.size, "index": lengths.size, "label": lengths.size}
        # Everything is checked before anything is written.
        arrays = {name: part.checked(given[name], counts[part.kind]) for name, part in self._parts.items()}
        if (total := int(arrays["index"].sum())) != ids.size:
            raise DataError(f"the lengths add up to {total:,}, but there are {ids.size:,} ids")
        arrays["index"] = np.cumsum(arrays["index"], dtype=np.uint64) + np.uint64(self.num_tokens)
        with self._telling_of_the_disk():
            for name, array in arrays.items():
                self._parts[name].write(array)
        self.num_tokens += ids.size
        self.num_samples += lengths.size

    def close(self) -> None:
        """Finish the file and move it to its path. Without this call no file is created."""
        if self._file.closed:
            return
        with self._telling_of_the_disk():
            sections = [part.finish(name, self._file) for name, part in self._parts.items()]
            header = encode_header(sections, self._meta)
            offset = _align(self._file)
            self._file.write(header)
            self._file.seek(0)
            self._file.write(encode_preamble(header, offset))
            self._new.commit()

    def discard(self) -> None:
        """Cancel: close and remove what was written."""
        self._new.discard()
        for part in self._parts.values():
            if part.file is not None:
                with contextlib.suppress(OSError):  # on a full disk the flush on close fails again
                    part.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close() if kind is None else self.discard()

    def __del__(self) -> None:
        if "_file" in vars(self) and not self._file.closed:
            self.discard()

    @contextlib.contextmanager
    def _telling_of_the_disk(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if "_file" in vars(self):
                self.discard()
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                problem = f"the disk is full after {self.num_tokens:,} tokens; free disk space, or write elsewhere"
            else:
                problem = str(error.strerror or error)
            raise DataError(f"{self.path} cannot be written: {problem}") from error


class _Part:
    """One section being written: its values go to a file, checksum and count are updated."""

    def __init__(
        self, title: str, kind: Kind, dtype: str, *, width: int | None = None, vocab_size: int | None = None
    ) -> None:
        self.title, self.kind, self.width, self.vocab_size = title, kind, width, vocab_size
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.kind != "f":
            limits = np.iinfo(self.dtype)
            self.lowest, self.highest = int(limits.min), int(limits.max) if vocab_size is None else vocab_size - 1
        self.file: IO[bytes] | None = None
        self._count = self._crc = 0

    def checked(self, values: ArrayLike, count: int) -> NDArray[Any]:
        """Return `count` values (or rows of `width`) as a flat array; refuse those that the dtype cannot hold."""
        array = np.asarray(values)
        shape = (count,) if self.width is None else (count, self.width)
        if array.shape != shape:
            raise DataError(f"{self.title} must have shape {shape}, found shape {array.shape}")
        array = array.reshape(-1)
        if not array.size:
            return array.astype(self.dtype)
        if self.dtype.kind == "f" and array.dtype.kind in "iuf":
            return array
        if array.dtype.kind not in "iu":
            raise DataError(f"{self.title} must be integers, found {array.dtype}")
        if array.dtype == self.dtype and self.vocab_size is None:
            return array
        low, high = int(np.minimum.reduce(array)), int(np.maximum.reduce(array))
        if low < self.lowest or high > self.highest:
            found = low if low < self.lowest else high
            why = (
                f"to fit {self.dtype.name}" if self.vocab_size is None else f"for a vocabulary of {self.vocab_size:,}"
            )
            raise DataError(f"{self.title} must be {self.lowest} … {self.highest} {why}, found {found}")
        return array

    def write(self, array: NDArray[Any]) -> None:
        """Append values."""
        assert self.file is not None
        for start in range(0, array.size, _PIECE):
            piece = np.ascontiguousarray(array[start : start + _PIECE], self.dtype).data
            self._crc = zlib.crc32(piece, self._crc)
            self.file.write(piece)
        self._count += array.size

    def finish(self, name: str, target: IO[bytes]) -> FileSection:
        """Append the section to the token file (the tokens are already there) and return its location."""
        assert self.file is not None
        size, offset = self._count * self.dtype.itemsize, PREAMBLE_BYTES
        if self.file is not target:
            offset = _align(target)
            self.file.seek(0)
            shutil.copyfileobj(self.file, target, 4 * _BUFFER)
            self.file.close()
        shape = (self._count,) if self.width is None else (self._count // self.width, self.width)
        return FileSection(name, self.kind, self.dtype.name, shape, offset, size, self._crc)


def _declare(
    dtype: str,
    vocab_size: int | None,
    streams: Mapping[str, str],
    sample_labels: Mapping[str, str | tuple[str, int]],
) -> dict[str, _Part]:
    if problem := declaration_problem("tokens", "tokens", dtype):
        raise DataError(f"the tokens have {problem}")
    parts = {
        "tokens": _Part("ids", "tokens", dtype, vocab_size=vocab_size),
        "index": _Part("lengths", "index", "uint64"),
    }
    kinds: tuple[tuple[Kind, Mapping[str, Any]], ...] = (("stream", streams), ("label", sample_labels))
    for kind, declared in kinds:
        for name, spec in declared.items():
            its_dtype, width = spec if isinstance(spec, tuple) else (spec, None)
            if (problem := declaration_problem(name, kind, its_dtype)) or (width is not None and width < 1):
                raise DataError(f"{kind} {name!r} has {problem or f'width {width}; at least 1 is needed'}")
            if name in parts:
                raise DataError(f"{name!r} is both a stream and a label; rename one of them")
            parts[name] = _Part(f"{kind} {name!r}", kind, its_dtype, width=width)
    return parts


def _align(file: IO[bytes]) -> int:
    position = file.seek(0, os.SEEK_END)
    file.write(bytes(-position % ALIGNMENT))
    return position + -position % ALIGNMENT
