"""The bytes of a joblib file, decompressed on the way, with bounds on what is read and held of them."""

import io
import json
import lzma
import math
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from joblib.compressor import _COMPRESSORS  # type: ignore[import-untyped]
from joblib.numpy_pickle_utils import _detect_compressor  # type: ignore[import-untyped]

from etude.core.errors import DataError
from etude.multimodal.codebooks.array_files import CHUNK, reading

MAX_STREAM = 16 << 30
"""The most bytes of a file, decompressed. They are streamed, not held."""
MAX_HELD = 512 << 20
"""The most bytes that what is read may take, arrays not counted: they stay in the file until one is asked for."""
STEP = 256
"""What a part takes at most, besides text and bytes; a fitted estimator has some hundreds of parts."""

_FOREIGN = {
    b"PK\x03\x04": "a zip file; if it is an .npz file, give it that name",
    b"\x93NUMPY": "a NumPy array; give it the name .npy",
    b"ZF": "written by joblib < 0.10, which is not supported; load it with joblib and write it again",
}
# The highest preset of lzma needs 65 MiB; the header of a file could ask for 4 GiB.
_LZMA = (partial(lzma.LZMADecompressor, memlimit=256 << 20), 128)
# joblib's own for zlib and gzip fill the memory if something follows the end, and miss a truncated checksum.
_DECOMPRESSORS: dict[str, tuple[Callable[[], Any], int]] = {
    "zlib": (zlib.decompressobj, 4096),
    "gzip": (partial(zlib.decompressobj, 31), 4096),
    "lzma": _LZMA,
    "xz": _LZMA,
}
"""What decompresses, and how many bytes are given to it at a time: no more than some MB can come of them."""


class _Decompressed(io.RawIOBase):
    """The stream inside a compressed file."""

    def __init__(self, file: BinaryIO, make: Callable[[], Any], block_bytes: int) -> None:
        self._file, self._decompressor, self._block_bytes, self._ready = file, make(), block_bytes, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed has no Buffer protocol here
        while not self._ready and not self._decompressor.eof:
            if not (block := self._file.read(self._block_bytes)):
                raise EOFError
            self._ready = self._decompressor.decompress(block)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


@dataclass
class JoblibStream:
    """An open joblib file."""

    path: Path
    file: BinaryIO
    position: int = 0
    held: int = 0

    def pieces(self, size: float) -> Iterator[bytes]:
        """Yield the next `size` bytes, which must be there, or all; no memory is taken for what is only claimed."""
        while size and (piece := self.file.read(int(min(size, CHUNK)))):
            self.position, size = self.position + len(piece), size - len(piece)
            if self.position > MAX_STREAM:
                raise refused(self.path, f"it decompresses to more than {MAX_STREAM} bytes")
            yield piece
        if 0 < size < math.inf:
            raise EOFError

    def skip(self, size: float) -> None:
        """Go on by `size` bytes."""
        for _ in self.pieces(size):
            pass

    def read(self, size: int) -> bytes:
        """Read an opcode or its argument."""
        self.hold(STEP)
        data = []
        for piece in self.pieces(size):
            self.hold(len(piece))
            data.append(piece)
        return b"".join(data)

    def readline(self) -> bytes:
        """Read an argument that ends with a newline."""
        line = self.file.readline(MAX_HELD)
        self.position += len(line)
        self.hold(len(line))
        return line

    def hold(self, num_bytes: int) -> None:
        """Count bytes that stay in memory until the file is read."""
        self.held += num_bytes
        if self.held > MAX_HELD:
            raise refused(self.path, f"what it holds besides arrays takes more than {MAX_HELD} bytes")


@contextmanager
def open_joblib(path: Path) -> Iterator[JoblibStream]:
    """Open a file as joblib does; whatever goes wrong in the block becomes a DataError about the file."""
    with reading(path), path.open("rb") as file:
        for magic, what in _FOREIGN.items():
            if file.peek().startswith(magic):
                raise DataError(f"{path}: this is no joblib file of today but {what}")
        inner: BinaryIO = file
        if (compression := _detect_compressor(file)) in _DECOMPRESSORS:
            inner = io.BufferedReader(_Decompressed(file, *_DECOMPRESSORS[compression]), CHUNK)
        elif compression in _COMPRESSORS:
            inner = _COMPRESSORS[compression].decompressor_file(file)
        yield JoblibStream(path, inner)


def refused(path: Path, why: str, access: str = '["centroids"]') -> DataError:
    """Return the error for a file that only the real joblib, which executes what it loads, could open.

    The command that converts the file reaches the array by the expression `access`.

    >>> print(str(refused(Path("a.joblib"), "no arrays", ".means_")).partition("convert it: ")[2])
    python -c 'import joblib, numpy; numpy.savez("a.npz", centroids=numpy.array(joblib.load("a.joblib").means_, "f4"))'
    """
    source, target = (json.dumps(str(name), ensure_ascii=False) for name in (path, path.with_suffix(".npz")))
    code = f'import joblib, numpy; numpy.savez({target}, centroids=numpy.array(joblib.load({source}){access}, "f4"))'
    return DataError(
        f"{path}: {why}; only joblib.load could open it, which executes code from the file. If you trust the file, "
        f"convert it: python -c {shlex.quote(code)}"
    )
