"""Which checkpoints to keep: the newest, and the best by a monitored number. Pure functions."""

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


def best_first(entries: Iterable[Entry], mode: Mode) -> list[Entry]:
    """Return the entries that have a value, best first; of equal ones the earlier step. NaN is no value.

    >>> best_first([Entry(1, 0.5), Entry(2, 0.2), Entry(3), Entry(4, float("nan"))], "min")
    [Entry(step=2, value=0.2), Entry(step=1, value=0.5)]
    """
    sign = 1.0 if mode == "min" else -1.0
    measured = [(sign * e.value, e.step, e) for e in entries if e.value is not None and not math.isnan(e.value)]
    return [entry for _, _, entry in sorted(measured, key=lambda item: item[:2])]


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
