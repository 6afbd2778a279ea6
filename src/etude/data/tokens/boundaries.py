"""Where the samples of a token file begin and end."""

from collections.abc import Callable
from threading import Lock
from typing import Protocol

import numpy as np

from etude.data.tokens.vectors import ArrayVector, Ints, Vector


class Boundaries(Protocol):
    """Spans of samples by number, and samples by position."""

    @property
    def count(self) -> int:
        """Samples there are."""

    def spans(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return starts and stops as the file has them; the caller checks that they lie inside it."""

    def at(self, positions: Ints) -> Ints:
        """Return the last sample that starts at or before each position, if they are in order; the caller checks."""

    def forget(self, first: int, stop: int) -> None:
        """Let go of the memory that looking up these samples in order has made resident."""


class Offsets:
    """Samples that lie one after the other: sample i from offset i to offset i + 1."""

    def __init__(self, offsets: Vector) -> None:
        self._offsets, self.count = offsets, offsets.count - 1

    def spans(self, indices: Ints) -> tuple[Ints, Ints]:
        """Look up two neighbouring offsets per sample."""
        return self._offsets.pairs(indices)

    def at(self, positions: Ints) -> Ints:
        """Search in the offsets, without reading all of them."""
        return np.minimum(self._offsets.search(positions), self.count) - 1

    def forget(self, first: int, stop: int) -> None:
        """Forget their offsets."""
        self._offsets.forget(first, stop)


class Scanned:
    """Offsets that are found by going through the tokens, when they are first needed."""

    def __init__(self, where: str, scan: Callable[[], Ints]) -> None:
        self._where, self._scan, self._lock = where, scan, Lock()
        self._found: Offsets | None = None

    @property
    def count(self) -> int:
        """Samples there are."""
        return self._offsets().count

    def spans(self, indices: Ints) -> tuple[Ints, Ints]:
        """Look up two offsets per sample."""
        return self._offsets().spans(indices)

    def at(self, positions: Ints) -> Ints:
        """Search in the offsets."""
        return self._offsets().at(positions)

    def forget(self, first: int, stop: int) -> None:
        """Nothing: they are kept."""

    def _offsets(self) -> Offsets:
        if self._found is None:
            with self._lock:
                if self._found is None:
                    self._found = Offsets(ArrayVector(self._where, self._scan()))
        return self._found
