"""The global generators of Python, NumPy and torch: read, written and checked in a microsecond each.

`random.getstate` converts a memory block to 625 integers (15 µs), and NumPy's `get_state` copies its words one by one
(50 µs): too slow for every batch. Here the memory itself is copied, after checking that it holds what these functions
return. On a Python or NumPy where it does not, the functions are used.
"""

import ctypes
import random
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

WORDS = 624
"""Words of a Mersenne Twister's state; one more number counts the used ones."""
STATE_BYTES = 4 * (WORDS + 1)

Accessors = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How the state of one generator is read and written."""


class GlobalGenerator(NamedTuple):
    """A generator: how its state is read, written and seeded."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _python() -> Accessors:
    inst: Any = random._inst
    base: Any = random.Random.__base__
    if base.__basicsize__ < object.__basicsize__ + STATE_BYTES:
        return random.getstate, random.setstate
    memory = (ctypes.c_char * STATE_BYTES).from_address(id(inst) + object.__basicsize__)
    used, *words = struct.unpack(f"{WORDS + 1}I", memory.raw)
    if (*words, used) != random.getstate()[1]:
        return random.getstate, random.setstate

    def read() -> Any:
        return memory.raw, inst.gauss_next

    def write(state: Any) -> None:
        memory.raw, inst.gauss_next = state

    return read, write


def _numpy() -> Accessors:
    module: Any = np.random
    twister, found = module.get_bit_generator(), module.get_state()
    memory = (ctypes.c_char * STATE_BYTES).from_address(twister.ctypes.state_address)
    # The second of a pair of normal numbers is cached in the object around the generator: a flag and the number.
    probe, value = module.RandomState(0), 0.123456789
    probe.set_state((*probe.get_state()[:3], 1, value))
    probed = (ctypes.c_char * np.random.RandomState.__basicsize__).from_address(id(probe)).raw
    place = probed.find(struct.pack("i4xd", 1, value))
    if place < 0 or memory.raw != struct.pack(f"{WORDS + 1}I", *found[1].tolist(), found[2]):
        return _numpy_state, lambda state: np.random.set_state(
            (state[0], np.frombuffer(state[1], np.uint32), *state[2:])
        )
    gauss = (ctypes.c_char * 16).from_address(id(module.mtrand._rand) + place)

    def read() -> Any:
        with twister.lock:
            return memory.raw, gauss.raw

    def write(state: Any) -> None:
        with twister.lock:
            memory.raw, gauss.raw = state

    return read, write


def _numpy_state() -> Any:
    state: Any = np.random.get_state()
    return state[0], state[1].tobytes(), *state[2:]


GLOBALS = {
    "python": GlobalGenerator(*_python(), random.seed),
    "numpy": GlobalGenerator(*_numpy(), lambda seed: np.random.seed(seed & 0xFFFFFFFF)),
    "torch": GlobalGenerator(
        torch.default_generator.get_state, torch.default_generator.set_state, torch.default_generator.manual_seed
    ),
}


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch's CPU generator (about 13 µs)."""
    for generator in GLOBALS.values():
        generator.seed(seed)


def differ(one: Any, two: Any) -> bool:
    """Return whether two states of a generator differ."""
    if isinstance(one, torch.Tensor):
        return ctypes.string_at(one.data_ptr(), one.nbytes) != ctypes.string_at(two.data_ptr(), two.nbytes)
    return bool(one != two)


_CALLS = dict.fromkeys(GLOBALS, 0)


def _counted(generator: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        _CALLS[generator] += 1
        return function(*args, **options)

    return call


_READERS = [
    (vars(module), name, _counted(generator, getattr(module, name)))
    for generator, module, name in (
        ("python", random, "getstate"),
        ("numpy", np.random, "get_state"),
        *(("torch", module, name) for module in (torch, torch.random) for name in ("initial_seed", "get_rng_state")),
    )
]
"""Functions that return the state or seed of a generator: module, name, and call counter."""


class Preserved:
    """Draws inside the block do not change Python's, NumPy's and torch's CPU generators.

    Afterwards `drawn` lists those `watched` that were drawn from, or whose state was read through their module.

    >>> _ = torch.manual_seed(1); expected = torch.rand(1); _ = torch.manual_seed(1)
    >>> with Preserved(GLOBALS) as preserved:
    ...     _ = torch.rand(1)
    >>> preserved.drawn, bool(torch.rand(1) == expected)
    (['torch'], True)
    """

    __slots__ = ("_calls", "_states", "drawn", "watched")
    _lock = threading.Lock()
    _watching = 0
    _functions: tuple[Any, ...] = ()

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
            elif differ(state, generator.read()):
                generator.write(state)
                drawn.append(name)
            elif _CALLS[name] != self._calls[name]:
                drawn.append(name)

    def _count_calls(self, change: int) -> None:
        """Count the calls of state readers while anything is watching."""
        with Preserved._lock:
            before = Preserved._watching
            Preserved._watching = now = before + change
            if before == 0:
                Preserved._functions = tuple(place[name] for place, name, _ in _READERS)
                for place, name, counting in _READERS:
                    place[name] = counting
            elif now == 0:
                for (place, name, _), function in zip(_READERS, Preserved._functions, strict=True):
                    place[name] = function
