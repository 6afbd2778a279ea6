"""Seeding, the state of every random generator of a run, and isolated random draws."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (every device).

    >>> set_seed(7); a = torch.rand(1); set_seed(7); bool(a == torch.rand(1))
    True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of every generator, as tensors, numbers and lists (nothing that needs pickle)."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def host_draws() -> tuple[object, ...]:
    """Return a fingerprint that changes if a random number is drawn on the host.

    >>> before = host_draws(); _ = torch.rand(1, generator=torch.Generator()); before == host_draws()
    True
    >>> _ = torch.rand(1); before == host_draws()
    False
    """
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)["state"]
    key, position = numpy_state["key"].tobytes(), numpy_state["pos"]
    return random.getstate(), key, position, torch.get_rng_state().numpy().tobytes()


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def rewinder() -> Callable[[], None]:
    """Return a function that gives the generators that `aside` covers their present states again.

    >>> rewind = rewinder(); first = torch.rand(1); rewind(); bool(torch.rand(1) == first)
    True
    """
    devices = _devices()
    python, numpy, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = [device.get_rng_state() for device in devices]

    def rewind() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(tensor)
        for device, state in zip(devices, before, strict=True):
            device.set_rng_state(state)

    return rewind


@contextmanager
def aside(seed: int) -> Iterator[None]:
    """Draw from generators seeded by `seed`; restore their states afterwards (about 60 µs).

    This covers Python, NumPy, and torch on the CPU and the current device, but no other devices.

    >>> set_seed(7); expected = torch.rand(1); set_seed(7)
    >>> with aside(1):
    ...     _ = torch.rand(1), random.random(), np.random.rand()
    >>> bool(torch.rand(1) == expected)
    True
    """
    rewind = rewinder()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.random.fork_rng takes 1 ms if CUDA is not initialised
    for device in _devices():
        device.manual_seed(seed)
    try:
        yield
    finally:
        rewind()


def _devices() -> list[Any]:
    """Return the torch device modules, besides the CPU, with a generator in use: that of the current device."""
    cuda = [torch.cuda] if torch.cuda.is_initialized() else []
    return [*cuda, torch.mps] if torch.backends.mps.is_available() else cuda


class Replay:
    """Torch's random state at one point, to be replayed; no synchronisation, since generator states are on the host.

    >>> random = Replay(torch.device("cpu"))
    >>> random.remember()
    >>> first, second = torch.rand(1), torch.rand(1)
    >>> with random.again():
    ...     torch.rand(1) == first
    tensor([True])
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        self._states: list[Tensor] = []

    def remember(self) -> None:
        """Save the current state."""
        self._states = self._now()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again in this block; the state after it does not depend on it."""
        with torch.random.fork_rng(self._cuda):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._cuda, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

    @property
    def has_drawn(self) -> bool:
        """Whether a random number has been drawn since `remember`."""
        return not all(map(torch.equal, self._states, self._now()))

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]


class GraphReplay:
    """Draws the numbers of a CUDA graph's first pass again in its second one, from a second state of the generator.

    A graph has its own count of the numbers drawn from a state, which cannot be set back while it is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._generator = torch.cuda.default_generators[index]
        self.state = self._generator.clone_state()
        """To be registered with the graph before it is recorded."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw from the second state in this block of the recording."""
        first = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self.state)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(first)

    def align(self) -> None:
        """Set the second state to the first one, before a replay; both are on the host."""
        self.state.manual_seed(self._generator.initial_seed())
        self.state.set_offset(self._generator.get_offset())


class RunRandom:
    """The random numbers of one run, independent of what the surrounding program draws.

    >>> run = RunRandom(seed=7)
    >>> with run.running(): first = torch.rand(2)
    >>> _ = torch.rand(9)  # other code
    >>> with run.running(): second = torch.rand(1)
    >>> set_seed(7); torch.equal(torch.rand(3), torch.cat([first, second]))
    True
    """

    def __init__(self, seed: int) -> None:
        with aside(seed):
            self._state = rng_state()
        self._is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw from the run's generators inside this block; afterwards the program's generators are restored."""
        with aside(0):
            set_rng_state(self._state)
            self._is_running = True
            try:
                yield
            finally:
                self._state = rng_state()
                self._is_running = False

    def state(self) -> dict[str, Any]:
        """Return the state of the run's generators as `rng_state` does."""
        return rng_state() if self._is_running else self._state

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._state = state
        if self._is_running:
            set_rng_state(state)


def check_rng_state(state: dict[str, Any]) -> None:
    """Raise an error unless `set_rng_state` accepts this state; the generators in use do not change."""
    random.Random().setstate(_python_state(state))
    np.random.RandomState(0).set_state(_numpy_state(state))
    torch.Generator().set_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.Generator("cuda").set_state(state["cuda"].cpu())


def _python_state(state: dict[str, Any]) -> tuple[Any, ...]:
    python = state["python"]
    return python["version"], tuple(python["words"].tolist()), python["gauss"]


def _numpy_state(state: dict[str, Any]) -> dict[str, Any]:
    numpy_state = state["numpy"]
    key, position = numpy_state["key"].numpy().astype(np.uint32), numpy_state["pos"]
    if key.shape != (624,) or not 0 <= position <= 624:  # NumPy does not check them
        raise ValueError(f"the state of NumPy's generator has {key.shape} words and the position {position}")
    return {
        "bit_generator": "MT19937",
        "state": {"key": key, "pos": position},
        "has_gauss": numpy_state["has_gauss"],
        "gauss": numpy_state["gauss"],
    }


def mix(*values: int) -> int:
    """Mix integers into one 63-bit seed (splitmix64): nearby inputs give unrelated seeds.

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    state = 0
    for value in values:
        state = (state + (value & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
