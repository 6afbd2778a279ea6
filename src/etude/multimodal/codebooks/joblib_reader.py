"""Opens joblib files without executing what is in them: arrays, and containers and estimators that hold arrays.

Every object is an inert record; only what describes NumPy arrays is given meaning. Arrays stay in the file until one is
asked for. joblib writes the bytes of an array right behind the opcode that ends its description (`NumpyArrayWrapper`):
one byte with the length of the padding, the padding, and the values; before version 1.2 only the values.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from etude.core.errors import DataError
from etude.multimodal.codebooks.array_files import Array, Entry, array_of, describe
from etude.multimodal.codebooks.joblib_source import JoblibSource
from etude.multimodal.codebooks.pickle_machine import Budget, Global, Machine, Record, one_line

_WRAPPERS = {(f"{home}joblib.numpy_pickle", "NumpyArrayWrapper") for home in ("", "sklearn.externals.")}
_OLD_WRAPPERS = {"NDArrayWrapper", "ZNDArrayWrapper"}
_TYPE = re.compile(r"([biufcOSUVMm])(\d{1,9})")
_WORDS = {"S": "bytes", "U": "text", "M": "dates", "m": "times", "O": "object"}
_MOST_ARGS = 9
_LONGEST_NAME = 200


@dataclass(eq=False, slots=True)
class StoredType:
    """A NumPy dtype by its letter and size. `itemsize` is in bytes."""

    letter: str
    itemsize: int
    order: str = "="
    has_objects: bool = False
    is_plain: bool = True
    """False for structured types."""

    def __str__(self) -> str:
        if not self.is_plain:
            return "structured"
        return _WORDS.get(self.letter) or np.dtype(f"{self.letter}{self.itemsize}").name

    @property
    def is_number(self) -> bool:
        """True for what `to_numpy` knows: integers, floats, complex numbers and truth values."""
        return self.letter in "iufcb" and not self.has_objects

    def to_numpy(self) -> np.dtype[np.generic]:
        """Return the dtype of numbers."""
        assert self.is_number
        return np.dtype(f"{self.order}{self.letter}{self.itemsize}")


@dataclass(eq=False, slots=True)
class StoredArray:
    """An array that is in the file at `offset`, or whose bytes were part of the pickle; object arrays have neither."""

    dtype: StoredType | None = None
    shape: tuple[int, ...] = ()
    order: str = "C"
    offset: int | None = None
    data: bytes | bytearray | None = None

    @property
    def has_objects(self) -> bool:
        """True if its elements are Python objects."""
        return self.dtype is not None and self.dtype.has_objects

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


class NumpyMachine(Machine):
    """Gives meaning to what NumPy itself writes into pickles."""

    def call(self, function: object, args: object) -> object:
        """Return arrays, types and bytes for the functions of NumPy and copyreg; else an inert record."""
        # Longer arguments mean nothing here, and taking them apart could be repeated without end.
        if not isinstance(function, Global) or not isinstance(args, tuple) or len(args) > _MOST_ARGS:
            return Record(function, args)
        match (function.module, function.name, *args):
            case ("copyreg" | "copy_reg", "_reconstructor" | "__newobj__", kind, *rest):
                return Record(kind, tuple(rest))
            case ("numpy", "dtype", str(name), *_):
                return self._type(name)
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct", *_):
                return StoredArray()
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar", StoredType() as dtype, data):
                return self._inline(StoredArray(), (), dtype, "C", data)
            case ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer", data, dtype, shape, order):
                return self._inline(StoredArray(), shape, dtype, order, data)
            case ("_codecs", "encode", str(text), "latin1" | "latin-1"):
                return self._latin(text)
            case ("__builtin__" | "builtins", "bytes" | "bytearray"):
                return b""
            case ("__builtin__" | "builtins", "bytearray", bytes(data)):
                return data  # not changed by anyone: no copy is needed
        return Record(function, args)

    def build(self, target: object, state: object) -> object:
        """Complete types and arrays with their state; keep the state of all else as it is."""
        if isinstance(target, StoredType):
            return self._complete_type(target, state)
        if isinstance(target, StoredArray):
            match state:
                case (shape, dtype, bool(fortran), data) | (int(), shape, dtype, bool(fortran), data):
                    return self._inline(target, shape, dtype, "F" if fortran else "C", data)
            raise self.broken("an array with an unknown state")
        return super().build(target, state)

    def _type(self, name: str) -> StoredType:
        match = _TYPE.fullmatch(name)
        if match is None:
            raise self.source.refused(f"it has an array of the type {one_line(name, 40)!r}")
        letter, size = match[1], int(match[2])
        try:
            itemsize = np.dtype(name).itemsize if letter != "O" else size
        except (TypeError, ValueError) as error:
            raise self.source.refused(f"it has an array of the type {name!r}") from error
        return StoredType(letter, itemsize, has_objects=letter == "O", is_plain=letter != "V")

    def _complete_type(self, dtype: StoredType, state: object) -> StoredType:
        if not isinstance(state, tuple) or len(state) > _MOST_ARGS:
            raise self.broken("a dtype with an unknown state")
        match state:
            case (int(), "<" | ">" | "=" | "|" as order, _, _, _, int(), int(), *rest):
                dtype.order = "=" if order == "|" else order
                if rest and isinstance(rest[0], int):
                    dtype.has_objects = dtype.has_objects or bool(rest[0] & 1)
                return dtype
        raise self.broken("a dtype with an unknown state")

    def _latin(self, text: str) -> bytes:
        self.source.keep(len(text))
        try:
            return text.encode("latin1")
        except UnicodeEncodeError as error:
            raise self.broken("bytes that are no bytes") from error

    def _inline(self, array: StoredArray, shape: object, dtype: object, order: object, data: object) -> StoredArray:
        if not isinstance(dtype, StoredType):
            raise self.broken("an array without a type")
        array.dtype, array.shape, array.order = dtype, self._shape(shape), "F" if order == "F" else "C"
        if isinstance(data, str):  # bytes, as Python 2 wrote them
            data = self._latin(data)
        if isinstance(data, bytes | bytearray) and not dtype.has_objects:
            if len(data) != array.nbytes:
                raise self.broken(f"{len(data)} bytes for an array of {array.nbytes}")
            array.data = data
        elif not dtype.has_objects:
            raise self.source.refused("it has an array whose values are elsewhere")
        return array

    def _shape(self, shape: object) -> tuple[int, ...]:
        if not isinstance(shape, tuple) or len(shape) > 64:
            raise self.broken("an array without a shape")
        if not all(isinstance(length, int) and 0 <= length < 1 << 63 for length in shape):
            raise self.broken("an array with an impossible shape")
        return shape


class JoblibMachine(NumpyMachine):
    """Gives meaning to the arrays that joblib writes between the opcodes, too."""

    def build(self, target: object, state: object) -> object:
        """Go past the bytes of an array that follow its description."""
        if not isinstance(target, Record) or not isinstance(target.kind, Global):
            return super().build(target, state)
        if "joblib" in target.kind.module and target.kind.name in _OLD_WRAPPERS:
            raise self.source.refused("its arrays are in other files, as joblib < 0.10 wrote them")
        if target.kind.key not in _WRAPPERS:
            return super().build(target, state)
        facts = dict(_named(state, self.budget))
        dtype = facts.get("dtype")
        if not isinstance(dtype, StoredType):
            raise self.broken("an array without a type")
        array = StoredArray(dtype, self._shape(facts.get("shape")), "F" if facts.get("order") == "F" else "C")
        if dtype.has_objects:
            # Python objects are a pickle of their own, which knows nothing of joblib.
            NumpyMachine(self.source, self.budget).run()
            return array
        if facts.get("numpy_array_alignment_bytes") is not None:
            self.source.skip(int.from_bytes(self.source.read(1), "little"))
        array.offset = self.source.tell()
        self.source.skip(array.nbytes)
        return array


def joblib_entries(path: Path, wanted: tuple[str, ...] = ()) -> list[Entry]:
    """Return what a joblib file holds at its top and one level down, and the names with dots that are `wanted`.

    Attributes of objects, keys of dicts and places in lists are names. Raises DataError if it cannot be opened safely.
    """
    with JoblibSource(path) as source:
        machine = JoblibMachine(source)
        root = machine.run()
        source.finish()
        if isinstance(root, StoredArray):
            return [_entry(path, root, (), "")]
        found: dict[tuple[str, ...], Entry] = {}
        top = _named(root, machine.budget)
        for name, value in top:
            found[(name,)] = _entry(path, value, (name,), _access(root, name))
        for name, value in top:
            for inner, leaf in _named(value, machine.budget):
                found[name, inner] = _entry(path, leaf, (name, inner), _access(root, name) + _access(value, inner))
        for candidate in wanted:
            if (entry := _follow(path, root, tuple(candidate.split(".")), machine.budget)) is not None:
                found[entry.keys] = entry
        if not found:
            if isinstance(root, Record) and root.kind is not None:
                raise source.refused(f"it holds {_what(root)}, in which there are no arrays by name", "")
            raise DataError(f"{path}: it holds {_what(root)} and no arrays; write it again from the array")
    return list(found.values())


def _follow(path: Path, value: object, keys: tuple[str, ...], budget: Budget) -> Entry | None:
    """Return what the names lead to, if they do."""
    access = ""
    for key in keys:
        parts = dict(_named(value, budget))
        if key not in parts:
            return None
        value, access = parts[key], access + _access(value, key)
    return _entry(path, value, keys, access)


def _named(value: object, budget: Budget) -> list[tuple[str, object]]:
    """Return the parts of a value that have names: items of dicts, attributes of objects, places in lists."""
    if isinstance(value, list | tuple):
        budget.spend(len(value))
        return [(str(place), part) for place, part in enumerate(value)]
    if not isinstance(value, Record):
        return []
    pairs = list(value.pairs)
    for state in value.states:
        # With __slots__ the state is two dicts, one of them often None.
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            budget.spend(len(part.pairs) if isinstance(part, Record) else 1)
            pairs += part.pairs if isinstance(part, Record) else []
    budget.spend(len(pairs))
    return [(key, part) for key, part in pairs if isinstance(key, str) and len(key) <= _LONGEST_NAME]


def _access(parent: object, name: str) -> str:
    """Return the Python expression that gets a part: an index, a key or an attribute."""
    if isinstance(parent, list | tuple):
        return f"[{name}]"
    is_attribute = isinstance(parent, Record) and parent.states and name.isidentifier()
    return f".{name}" if is_attribute else f"[{json.dumps(name)}]"


def _what(value: object) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, StoredArray):
        return str(value)
    if isinstance(value, Global):
        return f"the name {_dotted(value)}"
    if isinstance(value, Record):
        kind = value.kind
        return "a dict" if kind is None else f"a {_dotted(kind) if isinstance(kind, Global) else 'Python'} object"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _dotted(name: Global) -> str:
    return f"{one_line(name.module, 60)}.{one_line(name.name, 60)}"


def _entry(path: Path, value: object, keys: tuple[str, ...], access: str) -> Entry:
    return Entry(keys, _what(value), isinstance(value, StoredArray), lambda: _read(path, value, keys, access))


def _read(path: Path, value: object, keys: tuple[str, ...], access: str) -> Array:
    name = one_line(repr(".".join(keys))) if keys else "its content"
    with JoblibSource(path) as source:
        if isinstance(value, Record | list) or (isinstance(value, StoredArray) and value.has_objects):
            raise source.refused(f"{name} is {_what(value)}, not an array of numbers", access)
        if not isinstance(value, StoredArray) or value.dtype is None or not value.dtype.is_number:
            raise DataError(f"{path}: {name} is {_what(value)}; a codebook is an array of real numbers")
        raw = value.data if value.offset is None else source.array_bytes(value.offset, value.nbytes)
    assert raw is not None
    return array_of(raw, value.dtype.to_numpy(), value.shape, value.order, str(path))
