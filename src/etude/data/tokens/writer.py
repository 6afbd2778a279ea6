"""TokenWriter: token files written in a stream, in constant memory, that appear whole or not at all."""

import contextlib
import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.core.errors import DataError
from etude.core.files import NewFile
from etude.data.tokens.layout import (
    ALIGNMENT,
    LABEL_DTYPES,
    PREAMBLE_BYTES,
    STREAM_DTYPES,
    TOKEN_DTYPES,
    Kind,
    Section,
    check_name,
    encode_header,
    encode_meta,
    encode_preamble,
)

_PIECE = 2**17  # values checked, converted and written at a time: small enough to stay in the processor's cache
_BUFFER = 2**20


class TokenWriter:
    """Writes a token file, sample by sample (`add`) or many at once (`add_many`).

    A sample is a row of token ids, with what was declared: one value per token for each of `streams`, one value (or
    `width` values) per sample for each of `sample_labels`. `meta` holds any JSON facts; ids are checked against its
    `vocab_size`. The same input gives the same bytes. Leaving the `with` block by an error leaves nothing behind.

    >>> folder = tempfile.TemporaryDirectory()
    >>> path = Path(folder.name) / "train.bin"
    >>> with TokenWriter(path, sample_labels={"label": "int8"}, meta={"vocab_size": 10}) as writer:
    ...     writer.add([1, 2, 3], labels={"label": 1})
    ...     writer.add_many([4, 5, 6, 7], lengths=[1, 3], labels={"label": [0, 1]})
    >>> from etude.data.tokens import open_tokens
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
        self._parts = _declare(dtype, streams, sample_labels)
        self._vocab_size: int | None = self._meta.get("vocab_size")
        if self._vocab_size is not None and self._vocab_size > int(np.iinfo(dtype).max) + 1:
            raise DataError(f"a vocabulary of {self._vocab_size:,} does not fit {dtype}; use dtype='uint32'")
        with self._telling_of_the_disk():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._new = NewFile(self.path, buffering=_BUFFER)
            self._file = self._new.file
            self._file.write(bytes(PREAMBLE_BYTES))
            self._parts["tokens"].file = self._file
            for name in self._parts.keys() - {"tokens"}:  # without a name: they vanish however the program ends
                self._parts[name].file = tempfile.TemporaryFile(dir=self.path.parent, buffering=_BUFFER)  # noqa: SIM115
            self._parts["index"].write(np.zeros(1, np.uint64))

    def add(
        self,
        ids: ArrayLike,
        *,
        streams: Mapping[str, ArrayLike] = {},
        labels: Mapping[str, ArrayLike] = {},
    ) -> None:
        """Add one sample."""
        array = np.asarray(ids)
        self.add_many(
            array, [array.size], streams=streams, labels={name: np.asarray(v)[None] for name, v in labels.items()}
        )

    def add_many(
        self,
        ids: ArrayLike,
        lengths: ArrayLike,
        *,
        streams: Mapping[str, ArrayLike] = {},
        labels: Mapping[str, ArrayLike] = {},
    ) -> None:
        """Add many samples, whose ids lie one after the other."""
        if self._file.closed:
            raise DataError(f"{self.path} is already written; open another TokenWriter to write more")
        arrays = {"tokens": _whole_numbers("ids", ids), "index": _whole_numbers("lengths", lengths)}
        self._check_counts(arrays["tokens"], arrays["index"])
        for kind, given in (("stream", streams), ("label", labels)):
            declared = {name for name, part in self._parts.items() if part.kind == kind}
            if given.keys() != declared:
                found, allowed = (", ".join(sorted(names)) or "none" for names in (given.keys(), declared))
                raise DataError(f"every sample has the {kind}s that were declared ({allowed}), found {found}")
            count = arrays["tokens"].size if kind == "stream" else arrays["index"].size
            arrays |= {name: self._parts[name].prepared(name, value, count) for name, value in given.items()}
        for name, array in arrays.items():  # all is checked before anything is written
            if name != "index":
                self._parts[name].check(name, array, self._vocab_size if name == "tokens" else None)
        arrays["index"] = np.cumsum(arrays["index"], dtype=np.uint64) + np.uint64(self.num_tokens)
        with self._telling_of_the_disk():
            for name, array in arrays.items():
                self._parts[name].write(array)
        self.num_tokens += arrays["tokens"].size
        self.num_samples += arrays["index"].size

    def close(self) -> None:
        """Finish the file and put it in its place. Without this, nothing is there."""
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
        """Give up: close and remove what was written."""
        self._new.discard()
        for part in self._parts.values():
            if part.file is not None:
                with contextlib.suppress(OSError):  # a full disk fails again when a buffer is flushed
                    part.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if "_file" in vars(self) and not self._file.closed:
            self.discard()

    def _check_counts(self, ids: NDArray[Any], lengths: NDArray[Any]) -> None:
        if lengths.size and int(lengths.min()) < 0:
            raise DataError(f"a sample cannot have {int(lengths.min())} tokens")
        if int(lengths.sum()) != ids.size:
            raise DataError(f"the lengths add up to {int(lengths.sum()):,}, but there are {ids.size:,} ids")

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
                problem = f"the disk is full after {self.num_tokens:,} tokens; free some space, or write elsewhere"
            else:
                problem = str(error.strerror or error)
            raise DataError(f"{self.path} cannot be written: {problem}") from error


class _Part:
    """One section on its way: its values go to a file, their checksum and count are kept."""

    def __init__(self, kind: Kind, dtype: str, width: int | None = None) -> None:
        self.kind, self.width = kind, width
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.file: IO[bytes] | None = None
        self._count = self._crc = 0

    def prepared(self, name: str, values: ArrayLike, count: int) -> NDArray[Any]:
        """Return values of a stream or label, flat, as many as there are tokens or samples."""
        array = np.asarray(values)
        shape = (count,) if self.width is None else (count, self.width)
        if array.shape != shape:
            raise DataError(f"{self.kind} {name!r} must have shape {shape}, found {array.shape}")
        if self.dtype.kind == "f" and array.dtype.kind in "iuf":
            return array.reshape(-1)
        return _whole_numbers(f"{self.kind} {name!r}", array.reshape(-1))

    def check(self, name: str, array: NDArray[Any], below: int | None) -> None:
        """Refuse values that the type does not hold."""
        if self.dtype.kind == "f" or not array.size:
            return
        limits = np.iinfo(self.dtype)
        highest = limits.max if below is None else below - 1
        kept = np.iinfo(array.dtype)
        if kept.min >= limits.min and kept.max <= highest:
            return
        for start in range(0, array.size, _PIECE):
            piece = array[start : start + _PIECE]
            low, high = int(np.minimum.reduce(piece)), int(np.maximum.reduce(piece))
            if low < limits.min or high > highest:
                bad = low if low < limits.min else high
                why = f"to fit {self.dtype.name}" if below is None else f"for a vocabulary of {below:,}"
                raise DataError(f"{name} must be {limits.min} … {highest} {why}, found {bad}")

    def write(self, array: NDArray[Any]) -> None:
        """Append values."""
        assert self.file is not None
        for start in range(0, array.size, _PIECE):
            piece = np.ascontiguousarray(array[start : start + _PIECE], self.dtype).data
            self._crc = zlib.crc32(piece, self._crc)
            self.file.write(piece)
        self._count += array.size

    def finish(self, name: str, target: IO[bytes]) -> Section:
        """Append the section to the token file (the tokens are there already) and say where it lies."""
        size = self._count * self.dtype.itemsize
        offset = PREAMBLE_BYTES
        if self.file is not target:
            assert self.file is not None
            offset = _align(target)
            self.file.seek(0)
            shutil.copyfileobj(self.file, target, 4 * _BUFFER)
            self.file.close()
        shape = (self._count,) if self.width is None else (self._count // self.width, self.width)
        return Section(name, self.kind, self.dtype.name, shape, offset, size, self._crc)


def _declare(
    dtype: str, streams: Mapping[str, str], sample_labels: Mapping[str, str | tuple[str, int]]
) -> dict[str, _Part]:
    if dtype not in TOKEN_DTYPES:
        raise DataError(f"the dtype of tokens is {' or '.join(TOKEN_DTYPES)}, found {dtype!r}")
    parts = {"tokens": _Part("tokens", dtype), "index": _Part("index", "uint64")}
    for name, stream in streams.items():
        check_name(name)
        if stream not in STREAM_DTYPES:
            raise DataError(f"stream {name!r} has dtype {stream!r}; allowed are {', '.join(STREAM_DTYPES)}")
        parts[name] = _Part("stream", stream)
    for name, spec in sample_labels.items():
        check_name(name)
        label, width = spec if isinstance(spec, tuple) else (spec, None)
        if label not in LABEL_DTYPES or (width is not None and width < 1):
            raise DataError(f"label {name!r} has type {spec!r}; allowed are {', '.join(LABEL_DTYPES)}, with a width")
        if name in parts:
            raise DataError(f"{name!r} is both a stream and a label; give one of them another name")
        parts[name] = _Part("label", label, width)
    return parts


def _whole_numbers(what: str, values: ArrayLike) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise DataError(f"{what} must be a row of whole numbers, found shape {array.shape}")
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise DataError(f"{what} must be whole numbers, found {array.dtype}")
    return array


def _align(file: IO[bytes]) -> int:
    position = file.seek(0, os.SEEK_END)
    file.write(bytes(-position % ALIGNMENT))
    return position + -position % ALIGNMENT
