"""Reading idx files, the format of MNIST: a magic number, the dimensions, then the values."""

import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.core.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> npt.NDArray[np.generic]:
    """Read an idx file. Raises DataError if it is missing, truncated or no idx file."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_idx(raw, str(path))


def parse_idx(raw: bytes, name: str) -> npt.NDArray[np.generic]:
    """Return the array in the bytes of an idx file, in the machine's byte order; `name` is for error messages.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "example").tolist()
    [7, 8, 9]
    """
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES or raw[3] == 0:
        raise DataError(f"{name}: not an idx file (it begins with {raw[:4].hex(' ') or 'nothing'})")
    dtype, num_dims = np.dtype(_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * num_dims
    if len(raw) < start:
        raise DataError(f"{name}: truncated: {len(raw)} bytes, but the header alone takes {start}")
    shape = struct.unpack(f">{num_dims}I", raw[4:start])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "too long"
        raise DataError(f"{name}: {what}: {len(raw)} bytes, but its header {shape} asks for {expected}")
    # A copy: the result is writable and does not keep `raw` alive.
    return np.frombuffer(raw, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
