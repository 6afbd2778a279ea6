"""Arrays in joblib and pickle files, read without executing their contents.

The standard library's unpickler reads the opcodes. Every class or function named in a file is replaced by a record
class, so that a call creates a record and an object becomes a record of its state. Arrays and dtypes are constructed
here, because NumPy's `__setstate__` does not validate its input and could interpret file bytes as pointers.
"""

import builtins
import bz2
import io
import lzma
import math
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from etude.core.errors import DataError

MAX_BYTES = 16 << 30
"""Maximum size of a file, decompressed."""
_INFLATE = partial(zlib.decompressobj, 47)  # zlib and gzip
_XZ = partial(lzma.LZMADecompressor, memlimit=256 << 20)  # the header of a file could request 4 GiB
_DECOMPRESSORS: dict[bytes, Callable[[], Any]] = {
    b"\x78": _INFLATE,
    b"\x1f\x8b": _INFLATE,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": _XZ,
    b"\x5d\x00": _XZ,
}
"""Decompressors by the first bytes of a file."""
_PYTHON_UNPICKLER: Any = pickle._Unpickler  # the C version has no opcodes to replace
_MODULES = {"copy_reg": "copyreg", "__builtin__": "builtins"}  # their names in Python 2, and in protocols up to 2
_HARMLESS = {"copyreg", "_codecs", "collections", "datetime", "decimal", "enum", "pathlib", "types.SimpleNamespace"}
_HARMLESS |= {f"builtins.{name}" for name, value in vars(builtins).items() if isinstance(value, type)}
"""Standard library names that occur in ordinary files. They are not called either."""
_DTYPE = re.compile(r"[biufcOSUVMm]\d{1,9}")


def read_joblib(path: Path, wanted: tuple[str, ...] = ()) -> Any:
    """Return the single array of a joblib file, or its contents by name: the top level and one level down.

    Attributes of objects, keys of dicts and indices of lists form names, `model.steps.0`; those of `wanted` go
    further down. Anything but an array of numbers is replaced by a description.
    """
    try:
        root = _Unpickle(io.BytesIO(_content(path))).load()
    except DataError as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None  # names in a damaged file hold anything
    if isinstance(root, _Array):
        return root.plain()
    if not (found := _parts(root)):
        raise DataError(f"{path}: it holds {_describe(root)} and no arrays by name; write them with numpy.savez")
    found |= {f"{name}.{key}": part for name, one in found.items() for key, part in _parts(one).items()}
    for name in wanted:
        part = root
        for key in name.split("."):
            part = _parts(part).get(key)
        found |= {} if part is None else {name: part}
    return {name: part.plain() if isinstance(part, _Array) else _describe(part) for name, part in found.items()}


def _content(path: Path) -> bytes:
    raw = path.read_bytes()
    make = next((one for magic, one in _DECOMPRESSORS.items() if raw.startswith(magic)), None)
    if make is None:
        return raw
    decompressor = make()
    found: bytes = decompressor.decompress(raw, MAX_BYTES)
    if not decompressor.eof:
        why = f"it holds more than {MAX_BYTES} bytes" if len(found) == MAX_BYTES else "truncated; copy it again"
        raise DataError(why)
    return found


class _Record:
    """A dict, or a placeholder of a name, a call or an object: its values by name. Nothing in it can be executed."""

    kind: ClassVar = "dict"
    items: dict[str, Any]

    def __new__(cls, *args: Any, **_: Any) -> Any:
        """Return a record, or a placeholder of an array or bytes if the call would create one."""
        match (cls.kind, *args):
            case ("copyreg._reconstructor" | "copyreg.__newobj__", type() as made, *_):
                return made()
            case ("numpy.dtype", str(name), *_):
                return _DType(name)
            case ("numpy.multiarray._reconstruct", *_):
                return _Array()
            case ("numpy.multiarray.scalar", dtype, data):
                return _Array().fill((), dtype, "C", data)
            case ("numpy.numeric._frombuffer", data, dtype, shape, order):
                return _Array().fill(shape, dtype, order, data)
            case ("_codecs.encode", str(text), "latin1" | "latin-1"):
                return text.encode("latin1")
            case ("builtins.bytearray" | "builtins.bytes", bytes(data)):
                return data
        record = object.__new__(cls)
        record.items = {}
        return record

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # an object with slots has two states
            if isinstance(part, _Record):
                self.items |= part.items

    def __setitem__(self, key: object, value: object) -> None:
        if isinstance(key, str):  # other keys are not reachable, and hashing some of them never ends
            self.items[key] = value

    def append(self, element: object) -> None:
        """Ignored: elements of sets, and of objects that are lists."""

    extend = add = append


class _DType:
    """A dtype constructed from its letter and size."""

    def __init__(self, name: str) -> None:
        if not _DTYPE.fullmatch(name):
            raise ValueError(f"an array of the type {name[:60]!r}")
        self.dtype: np.dtype[Any] = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        _, order, *_, flags = (*state, 0) if len(state) < 9 else state[:9]
        has_objects = isinstance(flags, int) and flags & 1
        self.dtype = np.dtype(object) if has_objects else self.dtype.newbyteorder(order)


class _Array:
    """An array of a file. The array itself is not on the unpickler's stack, where its state could be set."""

    array: npt.NDArray[Any] | None = None
    text = "an array"

    def fill(self, shape: Any, dtype: Any, order: Any, data: Any) -> "_Array":
        """Set its state from the file; arrays of anything but numbers are only described."""
        self.text = f"{dtype.dtype.name} {shape}"
        if dtype.dtype.kind in "biufc":
            if not isinstance(data, bytes):
                raise ValueError("an array without its bytes")
            self.array = np.ndarray(shape, dtype.dtype, data, order="F" if order == "F" else "C")
        return self

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.fill(shape, dtype, "F" if fortran else "C", data)

    def plain(self) -> Any:
        """Return the array, or its description."""
        return self.text if self.array is None else self.array


class _Unpickle(_PYTHON_UNPICKLER):  # type: ignore[misc]
    """The standard library's unpickler, in which every named class is a record class."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.file = file

    def find_class(self, module: str, name: str) -> type[_Record]:
        module = re.sub(r"^numpy\._?core\.", "numpy.", _MODULES.get(module, module))
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names and not {top, f"{module}.{name}"} & _HARMLESS:
            raise DataError(
                f"it names {module}.{name}, which no array needs and which may be malicious; do not use it"
            )
        return type("Record", (_Record,), {"kind": f"{module}.{name}"})

    def get_extension(self, code: int) -> None:
        raise ValueError(f"the extension {code} of the Python that wrote it")  # the registry contains real functions

    def load_build(self) -> None:
        super().load_build()
        record = self.stack[-1]
        if isinstance(record, _Record) and record.kind.endswith("joblib.numpy_pickle.NumpyArrayWrapper"):
            self.stack[-1] = self._array_ahead(**record.items)

    def _array_ahead(self, shape: Any, dtype: _DType, order: str, **more: Any) -> _Array:
        """Return the array whose bytes joblib wrote right after its description."""
        if dtype.dtype.hasobject:
            _Unpickle(self.file).load()  # Python objects are a separate pickle
            return _Array().fill(shape, dtype, order, b"")
        # since joblib 1.2: a length byte and that much padding
        if more.get("numpy_array_alignment_bytes") is not None:
            self.file.seek(self.file.read(1)[0], io.SEEK_CUR)
        return _Array().fill(shape, dtype, order, self.file.read(math.prod(shape) * dtype.dtype.itemsize))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(record := _Record())
        for key, value in zip(items[::2], items[1::2], strict=True):
            record[key] = value

    dispatch: ClassVar = {
        **_PYTHON_UNPICKLER.dispatch,
        ord("b"): load_build,
        ord("d"): load_dict,
        ord("}"): lambda self: self.append(_Record()),
        0x8F: lambda self: self.append(_Record()),  # EMPTY_SET
        0x91: _PYTHON_UNPICKLER.load_list,  # FROZENSET: elements must not be hashed
        0x96: _PYTHON_UNPICKLER.load_binbytes8,  # BYTEARRAY8 would allocate memory before reading
    }


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, (list, tuple)):
        return {str(place): part for place, part in enumerate(value)}
    return dict(value.items) if isinstance(value, _Record) else {}


def _describe(value: Any) -> str:
    return value.kind if isinstance(value, _Record) else type(value).__name__
