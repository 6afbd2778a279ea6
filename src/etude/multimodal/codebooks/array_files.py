"""Arrays in .npy, .npz and .safetensors files, each under its name and read only when asked for."""

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from torch import Tensor

from etude.core.errors import DataError

Array = npt.NDArray[np.generic]
MAX_ARRAY = 4 << 30
"""The most bytes of one array that is read."""
CHUNK = 1 << 20
_MAX_HEADER = 10_000  # NumPy's own limit, checked here before the header is in memory
_HEADERS = {(1, 0): (2, np.lib.format.read_array_header_1_0), (2, 0): (4, np.lib.format.read_array_header_2_0)}


@dataclass(frozen=True)
class Entry:
    """One thing in a file: the names that lead to it (none for a file that is one array) and how to read it."""

    keys: tuple[str, ...]
    what: str
    """Such as "float64 (2048, 64)", or the kind of object."""
    is_array: bool
    read: Callable[[], Array | Tensor]
    """Return the array; raises DataError if it cannot be read, or is none."""

    @property
    def name(self) -> str:
        """The names that lead to it, with dots."""
        return ".".join(self.keys)


def npy_entries(path: Path) -> list[Entry]:
    """Return the one array of an .npy file."""

    def read() -> Array:
        with path.open("rb") as file:
            return _read_npy(file, path.stat().st_size, str(path))

    try:
        with path.open("rb") as file:
            dtype, shape, _ = _npy_header(file, str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return [Entry((), describe(dtype, shape), True, read)]


def npz_entries(path: Path) -> list[Entry]:
    """Return the arrays of an .npz file by their names."""
    entries = []
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                key, what, is_array = member.filename, f"a file of {member.file_size} bytes", False
                if key.endswith(".npy"):
                    with archive.open(member) as file:
                        dtype, shape, _ = _npy_header(file, f"{path}, {key[:-4]!r}")
                    key, what, is_array = key[:-4], describe(dtype, shape), True
                entries.append(Entry((key,), what, is_array, partial(_read_member, path, member.filename)))
    except (DataError, OSError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # zipfile has no base class for what damaged archives raise
        raise damaged(str(path), error) from error
    return entries


def safetensors_entries(path: Path) -> list[Entry]:
    """Return the tensors of a .safetensors file by their names."""
    from safetensors import SafetensorError, safe_open

    def read(key: str) -> Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
                return tensor  # a view of the mapped file: the caller copies it
        except (SafetensorError, AttributeError, ValueError) as error:  # a dtype that torch does not have
            raise damaged(f"{path}, {key!r}", error) from error

    entries = []
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict)
                piece = file.get_slice(key)
                what = f"{str(piece.get_dtype()).lower()} {tuple(piece.get_shape())}"
                entries.append(Entry((key,), what, True, partial(read, key)))
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise damaged(str(path), error) from error
    return entries


def describe(dtype: object, shape: tuple[int, ...]) -> str:
    """Return what an array is, for messages.

    >>> describe(np.dtype("<f4"), (2048, 64))
    'float32 (2048, 64)'
    """
    return f"{dtype.name if isinstance(dtype, np.dtype) else dtype} {shape}"


def array_of(
    raw: bytes | bytearray, dtype: np.dtype[np.generic], shape: tuple[int, ...], order: str, where: str
) -> Array:
    """Return the bytes as an array; the lengths must agree."""
    try:
        flat: Array = np.frombuffer(raw, dtype) if raw else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if order == "F" else "C")
    except ValueError as error:  # more dimensions than NumPy has, or empty and too long
        raise damaged(where, error) from error


def _read_member(path: Path, name: str) -> Array:
    where = f"{path}, {name.removesuffix('.npy')!r}"
    if not name.endswith(".npy"):
        raise DataError(f"{where}: this is no array; numpy.savez puts arrays into files that end with .npy")
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            return _read_npy(file, archive.getinfo(name).file_size, where)
    except (DataError, OSError) as error:
        raise _unreadable(path, error) from error
    except Exception as error:
        raise damaged(where, error) from error


def _read_npy(file: IO[bytes], size: int, where: str) -> Array:
    dtype, shape, order = _npy_header(file, where)
    if dtype.hasobject:
        raise DataError(
            f"{where}: the array has dtype {dtype}, Python objects that would have to be unpickled, which executes "
            f"code; write it as numbers: numpy.savez(…, centroids=array.astype('float32'))"
        )
    expected = math.prod(shape) * dtype.itemsize
    if expected > MAX_ARRAY:
        raise DataError(f"{where}: the array takes {expected} bytes; the most read here are {MAX_ARRAY}")
    data = bytearray()
    while len(data) < expected and (piece := file.read(min(CHUNK, expected - len(data)))):
        data += piece
    # The byte too many: an archive verifies its checksum only where a member ends.
    if len(data) < expected or file.read(1):
        what = "truncated" if len(data) < expected else "too long"
        raise DataError(f"{where}: {what}: {size} bytes, but {describe(dtype, shape)} needs {expected} and a header")
    return array_of(data, dtype, shape, order, where)


def _npy_header(file: IO[bytes], where: str) -> tuple[np.dtype[np.generic], tuple[int, ...], str]:
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise DataError(f"{where}: version {version} of the .npy format; 1.0 and 2.0 are read")
        length_bytes, parse = _HEADERS[version]
        head = file.read(length_bytes)
        length = int.from_bytes(head, "little")
        if length > _MAX_HEADER:
            raise ValueError(f"a header of {length} bytes")
        shape, fortran, dtype = parse(io.BytesIO(head + file.read(length)))
        if any(size < 0 for size in shape):
            raise ValueError(f"the shape {shape}")
    except DataError:
        raise
    except Exception as error:  # a damaged header is parsed as Python text, which fails in many ways
        raise damaged(where, error) from error
    return dtype, tuple(shape), "F" if fortran else "C"


def _unreadable(path: Path, error: DataError | OSError) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"{path}: cannot be read ({error.strerror or error})")


def damaged(where: str, error: Exception) -> DataError:
    """Return the error for a file that makes no sense."""
    words = " ".join(str(error).split())[:160] or type(error).__name__
    return DataError(f"{where}: damaged, or not what its name says: {words}; copy or write it again")
