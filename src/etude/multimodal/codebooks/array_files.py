"""Arrays in .npy, .npz and .safetensors files, each under its name and read only when asked for."""

import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Make one DataError about a file of whatever goes wrong in the block: damaged files are wrong in many ways."""
    try:
        yield
    except DataError:
        raise
    except EOFError as error:
        raise DataError(
            f"{where}: truncated: it ends in the middle of its content; copy or write it again"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{where}: cannot be read ({error.strerror})") from error
        words = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(f"{where}: damaged, or not what its name says: {words}; copy or write it again") from error


def npy_entries(path: Path) -> list[Entry]:
    """Return the one array of an .npy file."""

    def read() -> Array:
        with reading(path), path.open("rb") as file:
            return _read_npy(file, str(path))

    with reading(path), path.open("rb") as file:
        dtype, shape, _ = _npy_header(file, str(path))
    return [Entry((), describe(dtype, shape), True, read)]


def npz_entries(path: Path) -> list[Entry]:
    """Return the arrays of an .npz file by their names."""
    entries = []
    with reading(path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name, what = member.filename.removesuffix(".npy"), f"a file of {member.file_size} bytes"
            is_array = name != member.filename
            if is_array:
                with archive.open(member) as file:
                    dtype, shape, _ = _npy_header(file, f"{path}, {name!r}")
                what = describe(dtype, shape)
            entries.append(Entry((name,), what, is_array, partial(_read_member, path, member.filename)))
    return entries


def safetensors_entries(path: Path) -> list[Entry]:
    """Return the tensors of a .safetensors file by their names."""
    from safetensors import safe_open

    def read(key: str) -> Tensor:
        with reading(f"{path}, {key!r}"), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor  # a view of the mapped file: the caller copies it

    entries = []
    with reading(path), safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  (not a dict)
            piece = file.get_slice(key)
            what = f"{str(piece.get_dtype()).lower()} {tuple(piece.get_shape())}"
            entries.append(Entry((key,), what, True, partial(read, key)))
    return entries


def describe(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> str:
    """Return what an array is, for messages.

    >>> describe(np.dtype("<f4"), (2048, 64))
    'float32 (2048, 64)'
    """
    return f"{dtype.name} {shape}"


def array_of(raw: bytes | bytearray, dtype: np.dtype[np.generic], shape: tuple[int, ...], order: str) -> Array:
    """Return the bytes as an array; ValueError unless the lengths agree."""
    flat: Array = np.frombuffer(raw, dtype) if raw else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _read_member(path: Path, name: str) -> Array:
    where = f"{path}, {name.removesuffix('.npy')!r}"
    if not name.endswith(".npy"):
        raise DataError(f"{where}: this is no array; numpy.savez puts arrays into files that end with .npy")
    with reading(where), zipfile.ZipFile(path) as archive, archive.open(name) as file:
        return _read_npy(file, where)


def _read_npy(file: IO[bytes], where: str) -> Array:
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
        raise DataError(f"{where}: {what}: {describe(dtype, shape)} takes {expected} bytes; copy or write it again")
    return array_of(data, dtype, shape, order)


def _npy_header(file: IO[bytes], where: str) -> tuple[np.dtype[np.generic], tuple[int, ...], str]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):  # the others are for headers that no array of numbers has
        raise DataError(f"{where}: version {version} of the .npy format; (1, 0) is read")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {shape}")
    return dtype, tuple(shape), "F" if fortran else "C"
