"""Random numbers for data: a separate stream in the global generators, and generators kept by objects."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from etude.core.random import mix, rng_state, set_rng_state
from etude.data.sources.global_rng import GLOBALS, Accessors, seed_generators

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
CLOSED = (*GENERATORS, torch.Tensor, np.ndarray, str, bytes, type, ModuleType, _BaseDataLoaderIter)
"""Types that are not searched for generators."""
DEPTH, SHORT = 8, 100
"""Maximum search depth, and maximum length of searched lists: the samples of a dataset are not searched."""


class RandomStream:
    """Random numbers that start from a seed and continue from block to block, independent of other draws.

    Inside `drawing` the global generators of Python, NumPy, torch's CPU and (if in use) CUDA belong to this stream,
    and so do the `owned` generator objects of other code. Outside they have the caller's state.

    >>> def draw(stream):
    ...     with stream.drawing():
    ...         return random.random()
    >>> one, two = RandomStream(5), RandomStream(5)
    >>> together = [draw(one), draw(one)]
    >>> apart = [draw(two), random.random(), draw(two)]
    >>> apart[0] == together[0] and apart[2] == together[1]
    True
    """

    def __init__(self, seed: int, owned: Sequence[Any] = (), *, swap_globals: bool = True) -> None:
        """Without `swap_globals` only the `owned` generators are swapped after the first block."""
        self._owned, self._swaps_globals = owned, swap_globals
        generators = [*_globals(), *(_accessors(generator) for generator in owned)]
        caller = [read() for read, _ in generators]
        seed_generators(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        seed_owned(owned, seed)
        self._states = [read() for read, _ in generators]
        _write(generators, caller)
        self._generators = generators
        self._marked: list[Any] = []
        self._later = generators if swap_globals else generators[len(generators) - len(owned) :]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        caller = [read() for read, _ in self._generators]
        _write(self._generators, self._states)
        try:
            yield
        finally:
            generators, number = self._generators, len(self._later)
            self._states = [read() for read, _ in generators][len(generators) - number :]
            _write(generators, caller)
            self._generators = self._later

    def mark(self) -> None:
        """Start watching for draws; call it inside `drawing`."""
        self._marked = [_comparable(read()) for read, _ in self._later]

    @property
    def has_drawn(self) -> bool:
        """Whether anything was drawn since `mark`."""
        return self._marked != [_comparable(state) for state in self._states]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators as plain data: numbers, lists, tuples and tensors."""
        with self.drawing():
            return {
                "globals": rng_state() if self._swaps_globals else None,
                "owned": [_plain(_accessors(generator)[0]()) for generator in self._owned],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; call it inside `drawing`, with the same generators."""
        if state["globals"] is not None:
            set_rng_state(state["globals"])
        for generator, saved in zip(self._owned, state["owned"], strict=True):
            _accessors(generator)[1](saved)


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _comparable(state: Any) -> Any:
    return state.tolist() if isinstance(state, torch.Tensor) else _plain(state)


def owned_generators(*owners: Any) -> list[Any]:
    """Return the generator objects that these objects keep, each once, nearest first.

    The search covers attributes, short lists, tuples and dicts, closures, partial functions and bound methods, down
    to `DEPTH`: it finds the generator of a dataset in a subset, and of a transform in a list.

    >>> class Sampler:
    ...     rng = None
    >>> sampler = Sampler(); sampler.rng = random.Random(1)
    >>> owned_generators(sampler, [sampler]) == [sampler.rng]
    True
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    level = list(owners)
    for _ in range(DEPTH):
        new = {id(one): one for one in level if id(one) not in seen}
        seen |= new.keys()
        found |= {key: one for key, one in new.items() if isinstance(one, GENERATORS)}
        level = [part for one in new.values() if not isinstance(one, CLOSED) for part in _parts_of(one)]
    return list(found.values())


def _parts_of(owner: Any) -> Iterator[Any]:
    """Yield the values an object directly holds, if they are few."""
    # Use the base class's methods: overridden ones may read data or count accesses.
    bases: tuple[Any, ...] = (list, tuple, dict)
    for base in bases:
        if isinstance(owner, base) and base.__len__(owner) <= SHORT:
            yield from dict.values(owner) if base is dict else base.__iter__(owner)
    yield from getattr(owner, "__dict__", {}).values()
    if isinstance(owner, FunctionType):
        for cell in owner.__closure__ or ():
            with suppress(ValueError):  # an empty closure cell
                yield cell.cell_contents
    if isinstance(owner, MethodType):
        yield owner.__self__
    if isinstance(owner, partial):
        yield from (owner.func, *owner.args, *owner.keywords.values())


def seed_owned(generators: Sequence[Any], seed: int) -> None:
    """Seed generator objects from one seed; those of one kind draw different numbers."""
    kinds = Counter[type]()
    for generator in generators:
        place = kinds[type(generator)]
        seed_generator(generator, mix(seed, place) if place else seed)
        kinds[type(generator)] += 1


def _globals() -> list[Accessors]:
    found: list[Accessors] = [(generator.read, generator.write) for generator in GLOBALS.values()]
    if torch.cuda.is_initialized():
        found.append(_accessors(torch.cuda.default_generators[torch.cuda.current_device()]))
    return found


def _accessors(generator: Any) -> Accessors:
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(generator, np.random.RandomState):
        return lambda: generator.get_state(legacy=False), generator.set_state
    return generator.get_state, generator.set_state


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator object of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = type(generator.bit_generator)
        generator.bit_generator.state = bits(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)


def _write(generators: list[Accessors], states: list[Any]) -> None:
    for (_, write), state in zip(generators, states, strict=True):
        write(state)
