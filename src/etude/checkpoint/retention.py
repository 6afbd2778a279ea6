"""Which checkpoints to keep: the newest, and the best by a monitored number. Pure functions.

In a run with a curriculum a phase trains other tasks than the phase before, so its loss is another number. Values
compare only within a phase: any checkpoint of a later phase ranks before all of an earlier one.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint as retention sees it."""

    step: int
    value: float | None = None
    """The monitored number at that step; None if it was not measured."""
    phase: float = 0.0
    """The phase of the curriculum in which it was measured."""


def best_first(entries: Iterable[Entry], mode: Mode) -> list[Entry]:
    """Return the entries that have a value, those of the latest phase first, in it the best, of equals the earlier.

    NaN is no value.

    >>> [entry.step for entry in best_first([Entry(1, 0.5), Entry(2, 0.2), Entry(3), Entry(4, float("nan"))], "min")]
    [2, 1]
    >>> [entry.step for entry in best_first([Entry(1, 0.2, phase=1), Entry(2, 0.9, phase=2)], "min")]
    [2, 1]
    """
    sign = 1.0 if mode == "min" else -1.0
    measured = [
        ((-e.phase, sign * e.value, e.step), e) for e in entries if e.value is not None and not math.isnan(e.value)
    ]
    return [entry for _, entry in sorted(measured, key=lambda item: item[0])]


def to_delete(entries: Sequence[Entry], keep_best: int, mode: Mode, protect: Set[int] = frozenset()) -> list[int]:
    """Return the steps to delete, oldest first: all but the newest, the best `keep_best` and the protected.

    While fewer than `keep_best` have a value, the newest others fill the places: a run that never validates
    still has something to fall back on.

    >>> to_delete([Entry(1, 0.5), Entry(2, 0.2), Entry(3, 0.4), Entry(4, 0.6)], keep_best=2, mode="min")
    [1]
    >>> to_delete([Entry(1), Entry(2), Entry(3)], keep_best=0, mode="min")
    [1, 2]
    """
    newest_first = sorted((entry.step for entry in entries), reverse=True)
    ranked = [entry.step for entry in best_first(entries, mode)]
    unmeasured = [step for step in newest_first[1:] if step not in ranked]
    keep = {*newest_first[:1], *(ranked + unmeasured)[:keep_best], *protect}
    return [step for step in reversed(newest_first) if step not in keep]
