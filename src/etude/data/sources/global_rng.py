"""The global generators of Python, NumPy and torch: read, written and watched in a microsecond each.

`random.getstate` makes 625 numbers of a block of memory (15 µs), and NumPy's `get_state` copies its words one by one
(50 µs): too much for every batch. Here the memory itself is copied, once it has been found to hold what those functions
return. Where it does not, on another Python or NumPy, the functions are used.
"""

import ctypes
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

WORDS = 624
"""Of a Mersenne Twister's state; one more number tells how many of them are used up."""
STATE_BYTES = 4 * (WORDS + 1)


class GlobalGenerator(NamedTuple):
    """One of them: how its state is read, written, compared, and set by a seed."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]
    differ: Callable[[Any, Any], bool]


def _python() -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    inst: Any = random._inst
    base: Any = random.Random.__base__
    offset = object.__basicsize__
    if sys.implementation.name != "cpython" or base.__basicsize__ < offset + STATE_BYTES:
        return random.getstate, random.setstate
    memory = (ctypes.c_char * STATE_BYTES).from_address(id(inst) + offset)
    used, *words = struct.unpack(f"{WORDS + 1}I", memory.raw)
    if (*words, used) != random.getstate()[1]:
        return random.getstate, random.setstate

    def read() -> Any:
        return memory.raw, inst.gauss_next

    def write(state: Any) -> None:
        memory.raw, inst.gauss_next = state

    return read, write


def _numpy() -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    module: Any = np.random
    twister, offset = module.get_bit_generator(), _gauss_offset()
    found = twister.state
    if found["bit_generator"] != "MT19937" or offset is None:
        return _NumpyState, _numpy_write
    memory = (ctypes.c_char * STATE_BYTES).from_address(twister.ctypes.state_address)
    if memory.raw != struct.pack(f"{WORDS + 1}I", *found["state"]["key"].tolist(), found["state"]["pos"]):
        return _NumpyState, _numpy_write
    # A second normal number, made with the first, is kept by the object around the generator.
    gauss = (ctypes.c_char * 16).from_address(id(module.mtrand._rand) + offset)
    lock, current = twister.lock, module.get_bit_generator

    def read() -> Any:
        if current() is not twister:  # somebody replaced it
            return _NumpyState()
        with lock:
            return memory.raw, gauss.raw

    def write(state: Any) -> None:
        if isinstance(state, _NumpyState):
            _numpy_write(state)
            return
        if current() is not twister:
            module.set_bit_generator(twister)
        with lock:
            memory.raw, gauss.raw = state

    return read, write


def _gauss_offset() -> int | None:
    """Return where a RandomState keeps a normal number for later: a flag, and 8 bytes on the number itself."""
    probe, value = np.random.RandomState(0), 0.123456789
    probe.set_state({**probe.get_state(legacy=False), "has_gauss": 1, "gauss": value})
    size: int = np.random.RandomState.__basicsize__
    memory = (ctypes.c_char * size).from_address(id(probe)).raw
    place = memory.find(struct.pack("i4xd", 1, value))
    return place if place > 0 and sys.implementation.name == "cpython" else None


_numpy_state = np.random.get_state


class _NumpyState:
    """A state of any of NumPy's generators, to be compared."""

    def __init__(self) -> None:
        self.state = _numpy_state(legacy=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NumpyState) and _plain(self.state) == _plain(other.state)

    __hash__ = None  # type: ignore[assignment]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _numpy_write(state: _NumpyState) -> None:
    np.random.set_state(state.state)


def _differ(one: Any, two: Any) -> bool:
    return bool(one != two)


def _tensors_differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    return ctypes.string_at(one.data_ptr(), one.nbytes) != ctypes.string_at(two.data_ptr(), two.nbytes)


GLOBALS = {
    "python": GlobalGenerator(*_python(), random.seed, _differ),
    "numpy": GlobalGenerator(*_numpy(), lambda seed: np.random.seed(seed & 0xFFFFFFFF), _differ),
    "torch": GlobalGenerator(
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        torch.default_generator.manual_seed,
        _tensors_differ,
    ),
}


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator (about 13 µs)."""
    for generator in GLOBALS.values():
        generator.seed(seed)


class _Reader:
    """Stands in for a function that returns the state of a generator, or its seed, and counts its calls."""

    def __init__(self, generator: str, module: ModuleType, name: str) -> None:
        self.generator, self.place, self.name = generator, vars(module), name
        self.function: Callable[..., Any] = self.place[name]

    def __call__(self, *args: Any, **options: Any) -> Any:
        _CALLS[self.generator] += 1
        return self.function(*args, **options)


_CALLS = dict.fromkeys(GLOBALS, 0)
_READERS = (
    _Reader("python", random, "getstate"),
    _Reader("numpy", np.random, "get_state"),
    *(
        _Reader("torch", module, name)
        for module in (torch, torch.random)
        for name in ("initial_seed", "get_rng_state")
    ),
)


class Preserved:
    """Whatever is drawn in the block leaves Python's, NumPy's and torch's CPU generator as they were.

    Afterwards `drawn` lists those of the `watched` that were drawn from, or asked for their state by their module.

    >>> _ = torch.manual_seed(1); expected = torch.rand(1); _ = torch.manual_seed(1)
    >>> with Preserved(GLOBALS) as preserved:
    ...     _ = torch.rand(1)
    >>> preserved.drawn, bool(torch.rand(1) == expected)
    (['torch'], True)
    """

    __slots__ = ("_calls", "_states", "drawn", "watched")
    _lock = threading.Lock()
    _watching = 0

    def __init__(self, watched: Iterable[str] = ()) -> None:
        self.watched = frozenset(watched)
        self.drawn: list[str] = []

    def __enter__(self) -> "Preserved":
        if self.watched:
            self._count_calls(1)
        self._calls = _CALLS.copy()
        self._states = [generator.read() for generator in GLOBALS.values()]
        return self

    def __exit__(self, *error: object) -> None:
        if self.watched:
            self._count_calls(-1)
        drawn = self.drawn = []
        for (name, generator), state in zip(GLOBALS.items(), self._states, strict=True):
            if name not in self.watched:
                generator.write(state)
            elif generator.differ(state, generator.read()):
                generator.write(state)
                drawn.append(name)
            elif _CALLS[name] != self._calls[name]:
                drawn.append(name)

    def _count_calls(self, change: int) -> None:
        """Let the readers stand in for their functions as long as anybody watches."""
        with Preserved._lock:
            before = Preserved._watching
            Preserved._watching = now = before + change
            if before == 0:
                for reader in _READERS:
                    reader.function = reader.place[reader.name]
                    reader.place[reader.name] = reader
            elif now == 0:
                for reader in _READERS:
                    reader.place[reader.name] = reader.function
