"""Arrays in joblib and pickle files, read by joblib's own unpickler without executing what is in them.

What a file would import stays a name, an object is a record of its state, an array a place in the file: nothing that
the opcodes can reach is a class or a function. Only text that is a name is hashed or compared, for a pickle of a few
bytes can describe structures on which that takes for ever.
"""

import json
import math
import pickletools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from joblib.numpy_pickle import NumpyUnpickler  # type: ignore[import-untyped]

from etude.core.spelling import shorten
from etude.multimodal.codebooks.array_files import MAX_ARRAY, Array, Entry, array_of, describe
from etude.multimodal.codebooks.joblib_stream import MAX_HELD, STEP, JoblibStream, open_joblib, refused

_MODULES = {"copy_reg": "copyreg", "__builtin__": "builtins"}  # as Python 2 calls them, and protocols up to 2
_DTYPE = re.compile(r"[biufcOSUVMm]\d{1,9}")
_MAKES_DATA = re.compile(
    r"(numpy|scipy|sklearn|pandas|torch|collections|datetime|pathlib)\..+"
    r"|types\.SimpleNamespace|builtins\.(set|frozenset|complex|range|slice)"
)
"""What a file may call besides what makes arrays. It is not called either: a record stands for the result."""
_MOST_ARGS = 9  # more mean nothing here, and taking them apart could be repeated without end
_LONGEST_NAME = 200


@dataclass(eq=False, slots=True)
class _Stored:
    """A name (`kind`), an object of the class with that name, or a dict, which has none."""

    kind: str = ""
    items: dict[str, object] = field(default_factory=dict)
    has_attributes: bool = False
    """True if the items are attributes."""

    def __setitem__(self, key: object, value: object) -> None:
        if isinstance(key, str) and len(key) <= _LONGEST_NAME:  # others are not hashed, and lead nowhere
            self.items[key] = value

    def append(self, element: object) -> None:
        """Elements of sets, and of objects that are lists, are not looked at."""

    extend = add = append


@dataclass(eq=False, slots=True)
class _StoredType:
    """A dtype made of its letter and size: what else a file says of it does not reach NumPy."""

    dtype: np.dtype[Any]


@dataclass(eq=False, slots=True)
class _StoredArray:
    """An array that is in the file at `offset`, or whose bytes were part of the pickle; object arrays have neither."""

    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype("V"))
    shape: tuple[int, ...] = ()
    order: str = "C"
    data: bytes = b""
    offset: int | None = None

    def fill(self, shape: object, dtype: object, order: object, data: object = None) -> "_StoredArray":
        """Set what a file says of it; without `data` the bytes are found later."""
        if not isinstance(dtype, _StoredType) or not isinstance(shape, tuple) or len(shape) > 64:
            raise ValueError("an array without a type or a shape")
        if not all(isinstance(length, int) and 0 <= length < 1 << 63 for length in shape):
            raise ValueError("an array with an impossible shape")
        self.dtype, self.shape, self.order = dtype.dtype, shape, "F" if order == "F" else "C"
        if data is not None and not self.dtype.hasobject:
            if not isinstance(data, bytes) or len(data) != self.num_bytes:
                raise ValueError(f"an array without its {self.num_bytes} bytes")
            self.data = data
        return self

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Memo(dict[int, object]):
    def __setitem__(self, index: int, value: object) -> None:
        if index > MAX_HELD:  # a file could choose numbers that collide
            raise ValueError(f"the memo index {index}")
        super().__setitem__(index, value)


class _Unpickler(NumpyUnpickler):  # type: ignore[misc]
    """joblib's unpickler, for which everything with a name is inert."""

    def __init__(self, stream: JoblibStream) -> None:
        super().__init__(str(stream.path), stream, False)
        self.stream, self.memo = stream, _Memo()

    def find_class(self, module: str, name: str) -> _Stored:
        module = _MODULES.get(module, module).replace("numpy._core.", "numpy.core.")
        return _Stored(f"{module}.{name}")

    def get_extension(self, code: int) -> None:
        raise refused(self.stream.path, f"it uses the extension {code} of the Python that wrote it")

    def load_dict(self) -> None:
        self.metastack[-1].append(_Stored())  # below its items
        self.load_setitems()

    def load_newobj(self) -> None:
        self.stack.pop()  # the arguments
        self.stack[-1] = _Stored(self.stack[-1].kind)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self._instantiate(self.stack.pop(), args)

    def _instantiate(self, function: _Stored, args: tuple[object, ...] | list[object]) -> None:
        if len(args) > _MOST_ARGS:
            raise ValueError(f"a call with {len(args)} arguments")
        self.append(self._result(function.kind, *args))

    def _result(self, function: str, *args: object) -> object:
        """Return what stands for the result of a call; only what makes arrays has a meaning."""
        match (function, *args):
            case ("copyreg._reconstructor" | "copyreg.__newobj__", _Stored(kind), *_):
                return _Stored(kind)
            case ("numpy.dtype", str(name), *_):
                if not _DTYPE.fullmatch(name):
                    raise refused(self.stream.path, f"it has an array of the type {_brief(name)}")
                return _StoredType(np.dtype(name))
            case ("numpy.core.multiarray._reconstruct", *_):
                return _StoredArray()
            case ("numpy.core.multiarray.scalar", dtype, data):
                return _StoredArray().fill((), dtype, "C", data)
            case ("numpy.core.numeric._frombuffer", data, dtype, shape, order):
                return _StoredArray().fill(shape, dtype, order, data)
            case ("_codecs.encode", str(text), "latin1" | "latin-1"):
                self.stream.hold(len(text))
                return text.encode("latin1")
            case ("builtins.bytearray" | "builtins.bytes", *data):
                return data[0] if data and isinstance(data[0], bytes) else b""
        if not _MAKES_DATA.fullmatch(function):
            raise refused(self.stream.path, f"it asks to call {_brief(function)}, which is not done")
        return _Stored(function)

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(state, tuple) and len(state) > _MOST_ARGS:
            raise ValueError(f"a state of {len(state)} parts")
        match target, state:
            case _StoredType(), (_, "<" | ">" | "=" | "|" as order, _, _, _, int(), int(), *flags):
                has_objects = bool(flags) and isinstance(flags[0], int) and flags[0] & 1
                target.dtype = np.dtype(object) if has_objects else target.dtype.newbyteorder(order)
            case _StoredArray(), (_, shape, dtype, bool(fortran), data):
                target.fill(shape, dtype, "F" if fortran else "C", data)
            case _Stored(kind), _Stored() if kind.endswith("joblib.numpy_pickle.NumpyArrayWrapper"):
                self.stack[-1] = self._array_ahead(state.items)
            case _Stored(kind), _ if "joblib." in kind and kind.endswith("NDArrayWrapper"):
                raise refused(self.stream.path, "its arrays are in other files, as joblib < 0.10 wrote them")
            case _Stored(), (_Stored(_, items)) | (None, _Stored(_, items)):  # the second: an object with __slots__
                target.items, target.has_attributes = items, True
            case _Stored(), _:
                pass
            case _:
                raise ValueError("a state that does not fit")

    def _array_ahead(self, facts: dict[str, object]) -> _StoredArray:
        """Go past the bytes of an array, which joblib writes right behind its description."""
        array = _StoredArray().fill(facts.get("shape"), facts.get("dtype"), facts.get("order"))
        if array.dtype.hasobject:
            _Unpickler(self.stream).load()  # Python objects are a pickle of their own
            return array
        if facts.get("numpy_array_alignment_bytes") is not None:  # since joblib 1.2: a length and so much padding
            self.stream.skip(self.stream.read(1)[0])
        array.offset = self.stream.position
        self.stream.skip(array.num_bytes)
        return array

    dispatch: ClassVar = {
        **{ord(op.code): NumpyUnpickler.dispatch[ord(op.code)] for op in pickletools.opcodes if op.proto <= 5},
        ord("b"): load_build,
        ord("d"): load_dict,
        ord("}"): lambda self: self.append(_Stored()),
        ord("R"): load_reduce,
        0x81: load_newobj,
        0x8F: lambda self: self.append(_Stored("builtins.set")),
        0x91: NumpyUnpickler.load_list,  # FROZENSET: elements are not hashed
        0x95: lambda self: self.read(8),  # FRAME: without frames every read is counted
        0x96: NumpyUnpickler.load_binbytes8,  # BYTEARRAY8 would take the memory before it reads
    }


@dataclass(frozen=True, eq=False)
class _Part:
    """A value in the file, the names that lead to it, and the Python expression that does."""

    value: object
    keys: tuple[str, ...] = ()
    access: str = ""

    def parts(self, stream: JoblibStream) -> "dict[str, _Part]":
        """Return the parts that have names: items of dicts, attributes of objects, places in lists."""
        named: list[tuple[str, str, object]] = []
        match self.value:
            case list() | tuple() as places:
                stream.hold(STEP * len(places))
                named = [(str(place), f"[{place}]", value) for place, value in enumerate(places)]
            case _Stored(_, items, has_attributes):
                stream.hold(STEP * len(items))
                for name, value in items.items():
                    is_attribute = has_attributes and name.isidentifier()
                    named.append((name, f".{name}" if is_attribute else f"[{json.dumps(name)}]", value))
        return {name: _Part(value, (*self.keys, name), self.access + access) for name, access, value in named}

    def __str__(self) -> str:
        match self.value:
            case _StoredArray(dtype, shape):
                return describe(dtype, shape)
            case _Stored(kind):
                return f"an object of {_brief(kind)}" if kind else "a dict"
        return f"a value of type {type(self.value).__name__}"

    def entry(self, path: Path) -> Entry:
        """Return it as something to choose and read."""
        return Entry(self.keys, str(self), isinstance(self.value, _StoredArray), lambda: self.read(path))

    def read(self, path: Path) -> Array:
        """Return the array; raises DataError if it is none of numbers."""
        array, name = self.value, _brief(".".join(self.keys)) if self.keys else "its content"
        if not isinstance(array, _StoredArray) or array.dtype.kind not in "iufcb":
            raise refused(path, f"{name} is {self}, not an array of real numbers", self.access)
        if array.num_bytes > MAX_ARRAY:
            raise refused(path, f"it has an array of {array.num_bytes} bytes; the most read here are {MAX_ARRAY}")
        with open_joblib(path) as stream:
            data: bytes | bytearray = array.data
            if array.offset is not None:
                stream.skip(array.offset)
                data = bytearray().join(stream.pieces(array.num_bytes))
            return array_of(data, array.dtype, array.shape, array.order)


def joblib_entries(path: Path, wanted: tuple[str, ...] = ()) -> list[Entry]:
    """Return what a joblib file holds at its top and one level down, and the names with dots that are `wanted`.

    Attributes of objects, keys of dicts and places in lists are names. Raises DataError if it cannot be opened safely.
    """
    with open_joblib(path) as stream:
        root = _Part(_Unpickler(stream).load())
        stream.skip(math.inf)  # to the end, where the checksum of a compressed file is
        found = list(root.parts(stream).values())
        found += [part for one in found for part in one.parts(stream).values()]
        for candidate in wanted:
            part: _Part | None = root
            for key in candidate.split("."):
                part = part and part.parts(stream).get(key)
            found += [part] if part and len(part.keys) > 2 else []
    if not found and not isinstance(root.value, _StoredArray):
        raise refused(path, f"it holds {root} and no arrays by name", "")
    return [part.entry(path) for part in found or [root]]


def _brief(name: str) -> str:
    """Return a name from a file, quoted, on one short line."""
    return repr(shorten(name, 120))
