"""The bytes of a joblib file, plain or decompressed on the way, with bounds on what may be read and kept."""

import bz2
import io
import json
import lzma
import shlex
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from etude.core.errors import DataError
from etude.multimodal.codebooks.array_files import CHUNK, MAX_ARRAY

MAX_STREAM = 16 << 30
"""The most bytes a compressed file may decompress to. They are streamed, not held."""
MAX_INLINE = 512 << 20
"""The most bytes of text and bytes objects, which are held while the file is read."""
MAX_LZMA_MEMORY = 256 << 20  # the highest preset needs 65 MiB; the header of a file could ask for 4 GiB

_FOREIGN = {
    b"PK\x03\x04": "a zip file; if it is an .npz file, give it that name",
    b"\x93NUMPY": "a NumPy array; give it the name .npy",
    b"\x04\x22\x4d\x18": "compressed with lz4, which cannot be read here; write it again with compress='zlib'",
    b"ZF": "written by joblib < 0.10, which is not supported; load it with joblib and write it again",
}


class Decompressor(Protocol):
    """What the decompressors of bz2 and lzma have in common."""

    @property
    def eof(self) -> bool:
        """True behind the end of the stream, its checksum verified."""

    @property
    def needs_input(self) -> bool:
        """True if nothing more comes out without more input."""

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """Return at most `max_length` bytes and keep the rest."""


class _Zlib:
    """zlib and gzip with the methods of the other decompressors."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # 32: zlib or gzip, whichever the header says
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        out = self._inner.decompress(self._inner.unconsumed_tail + data, max(max_length, 0))
        # A full answer may have left more inside, even with no input left over.
        self.needs_input = not self._inner.unconsumed_tail and len(out) < max_length
        return out


_DECOMPRESSORS: dict[bytes, Callable[[], Decompressor]] = {
    b"\x78": _Zlib,
    b"\x1f\x8b": _Zlib,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lambda: lzma.LZMADecompressor(memlimit=MAX_LZMA_MEMORY),
    b"\x5d\x00": lambda: lzma.LZMADecompressor(memlimit=MAX_LZMA_MEMORY),
}


class _Unfolded(io.RawIOBase):
    """The stream inside a compressed file, never more than one buffer of it in memory."""

    def __init__(self, file: BinaryIO, decompressor: Decompressor, damaged: Callable[[str], DataError]) -> None:
        super().__init__()
        self._file, self._decompressor, self._damaged = file, decompressor, damaged

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed has no Buffer protocol here
        while not self._decompressor.eof:
            data = self._file.read(1 << 16) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not data:
                raise self._damaged("the compressed data ends too early")
            try:
                out = self._decompressor.decompress(data, len(buffer))
            except (zlib.error, lzma.LZMAError, OSError, ValueError, EOFError) as error:
                raise self._damaged(f"it cannot be decompressed ({error})") from error
            if out:
                buffer[: len(out)] = out
                return len(out)
        return 0


class JoblibSource:
    """An open joblib file: reads, skips, and makes the errors about what is found in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = False
        """True once a read came back short."""
        self._kept = 0
        self._position = 0
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self._size = self._file.seek(0, io.SEEK_END)
            self._stream, self._compressed = self._opened()
        except BaseException:
            self._file.close()
            raise

    def _opened(self) -> tuple[BinaryIO, bool]:
        """Return the stream to read, and whether it is decompressed on the way."""
        self._file.seek(0)
        head = self._file.read(8)
        self._file.seek(0)
        for magic, what in _FOREIGN.items():
            if head.startswith(magic):
                raise DataError(f"{self.path}: this is no joblib file of today but {what}")
        maker = next((maker for magic, maker in _DECOMPRESSORS.items() if head.startswith(magic)), None)
        if maker is None:
            return self._file, False
        return io.BufferedReader(_Unfolded(self._file, maker(), self.damaged), CHUNK), True

    def __enter__(self) -> "JoblibSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def tell(self) -> int:
        """Return the position in the (decompressed) stream."""
        return self._position

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes, to be kept: fewer at the end, and no memory for bytes that are not there."""
        if size == 1:  # an opcode: by far the most frequent
            data = self._stream.read(1)
            self._advance(len(data), 1)
            return data
        self.keep(min(size, self._size) if not self._compressed else size)
        return bytes(self._collect(size))

    def readline(self) -> bytes:
        """Read up to and with the next newline."""
        line = self._stream.readline(MAX_INLINE - self._kept + 1)
        self._advance(len(line), len(line))
        self.keep(len(line))
        return line

    def keep(self, num_bytes: int) -> None:
        """Count bytes that stay in memory until the file is read; too many are refused."""
        self._kept += num_bytes
        if self._kept > MAX_INLINE:
            raise self.refused(f"it holds more than {MAX_INLINE} bytes of text and bytes objects")

    def array_bytes(self, offset: int, size: int) -> bytearray:
        """Return the `size` bytes at `offset` of the stream, which must be ahead."""
        if size > MAX_ARRAY:
            raise self.refused(f"it has an array of {size} bytes; the most read here are {MAX_ARRAY}")
        self.skip(offset - self._position)
        data = self._collect(size)
        if len(data) < size:
            raise self.truncated()
        return data

    def skip(self, size: int) -> None:
        """Go on by `size` bytes; the stream must have them."""
        if not self._compressed:
            if self._position + size > self._size:
                raise self.truncated()
            self._position = self._stream.seek(self._position + size)
            return
        left = size
        while left:
            got = len(self._stream.read(min(left, CHUNK)))
            self._advance(got, 1)
            left -= got
            if not got:
                raise self.truncated()

    def finish(self) -> None:
        """Read a compressed stream to its end, where its checksum is."""
        while self._compressed and (data := self._stream.read(CHUNK)):
            self._advance(len(data), 1)

    def _collect(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size and (piece := self._stream.read(min(size - len(data), CHUNK))):
            data += piece
            self._advance(len(piece), 1)
        self.ended = self.ended or len(data) < size
        return data

    def _advance(self, got: int, least: int) -> None:
        self._position += got
        self.ended = self.ended or got < least
        if self._compressed and self._position > MAX_STREAM:
            raise self.refused(f"it decompresses to more than {MAX_STREAM} bytes")

    def truncated(self) -> DataError:
        """Return the error for a file that ends in the middle."""
        return DataError(
            f"{self.path}: truncated: the file ends in the middle of its content; copy or write it again"
        )

    def damaged(self, why: str) -> DataError:
        """Return the error for a file that makes no sense."""
        return DataError(f"{self.path}: damaged, or not written by joblib: {why}; copy or write it again")

    def refused(self, why: str, access: str = '["centroids"]') -> DataError:
        """Return the error for a file that only the real joblib, which executes what it loads, could open."""
        return DataError(
            f"{self.path}: {why}; only joblib.load could open it, which executes code from the file. If you trust the "
            f"file, convert it: {conversion(self.path, access)}"
        )


def conversion(path: Path, access: str) -> str:
    """Return the shell command that makes an .npz file of one array of a joblib file.

    >>> print(conversion(Path("a.joblib"), ".means_"))
    python -c 'import joblib, numpy; numpy.savez("a.npz", centroids=numpy.array(joblib.load("a.joblib").means_, "f4"))'
    """
    source, target = (json.dumps(str(name), ensure_ascii=False) for name in (path, path.with_suffix(".npz")))
    code = f'import joblib, numpy; numpy.savez({target}, centroids=numpy.array(joblib.load({source}){access}, "f4"))'
    return f"python -c {shlex.quote(code)}"
