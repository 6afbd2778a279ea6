"""Loaders that take turns: each gives batches for a short while, next to a while of the one it is compared with."""

import gc
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.table import NOT_RUN, failure, missing, progress, quartiles


@dataclass(frozen=True)
class Contender:
    """A loader by name: what makes its endless batches, and what it needs."""

    name: str
    batches: Callable[[], Iterator[Any]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pace:
    rounds: int
    seconds: float
    """Of one while."""


class Runner:
    """The batches of a contender, which go on from one while to the next."""

    def __init__(self, contender: Contender, batch_size: int, seconds: float, check: Callable[[Any], None]) -> None:
        self.batches, self.batch_size = contender.batches(), batch_size
        check(next(self.batches))
        number, took = 4, 0.0
        while took < seconds / 4:
            number *= 2
            took = self._take(number)
        self.number = max(1, round(number * seconds / took))

    def speed(self) -> float:
        """Return samples per second of one while."""
        self._take(max(8, self.number // 20))  # what was made beforehand, and what others drove out of the caches
        return self.number * self.batch_size / self._take(self.number)

    def _take(self, number: int) -> float:
        begin = time.perf_counter()
        for _ in islice(self.batches, number):
            pass
        return time.perf_counter() - begin


Speeds = Sequence[tuple[float, float]]
Pairs = Mapping[str, Speeds | str]
"""By contender: its speeds, each with one of the first contender, or why it does not run here."""


def race(contenders: Sequence[Contender], pace: Pace, batch_size: int, check: Callable[[str, Any], None]) -> Pairs:
    """Return speeds of each contender that runs here, each with a speed of the first one right before it."""
    runners: dict[str, Runner] = {}
    absent: dict[str, str] = {}
    for one in contenders:
        progress(f"preparing {one.name}")

        def prepare(one: Contender = one) -> None:
            runners[one.name] = Runner(one, batch_size, pace.seconds, lambda batch: check(one.name, batch))

        if not one.needs:
            prepare()
        elif why := missing(one.needs) or failure(prepare):
            absent[one.name] = why
    gc.collect()
    gc.freeze()  # what others have imported need not be searched for garbage again and again
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    chance, reference = random.Random(0), runners[contenders[0].name]
    for turn in range(pace.rounds):
        progress(f"round {turn + 1} of {pace.rounds}")
        for name in chance.sample(list(pairs), len(pairs)):
            base = reference.speed()
            pairs[name].append((runners[name].speed(), base))
    progress("")
    gc.unfreeze()
    for runner in runners.values():
        if isinstance(runner.batches, Generator):
            runner.batches.close()  # ends worker processes and threads
    return pairs | absent


def rows_of(contenders: Sequence[Contender], pairs: Pairs, share: str) -> list[dict[str, Any]]:
    """Return name, samples per second and share of the first contender's speed for each, with quartiles."""
    rows: list[dict[str, Any]] = []
    for place, one in enumerate(contenders):
        found = pairs[one.name]
        if isinstance(found, str):
            rows.append({"loader": one.name, NOT_RUN: found})
            continue
        low, middle, high = quartiles([speed for speed, _ in found])
        row: dict[str, Any] = {
            "loader": one.name,
            "samples/s": middle,
            "quartiles": f"{low / 1e3:,.0f}k … {high / 1e3:,.0f}k",
        }
        ratios = quartiles([speed / base for speed, base in found])
        row |= {share: ratios[1]} if place else {share: 1.0}
        row |= {"quartiles of that": f"{ratios[0]:.3g} … {ratios[2]:.3g}"} if place else {}
        rows.append(row)
    return rows


def private_memory() -> int | None:
    """Return the bytes of memory that are this process's own, mapped files left out; None where that is not known."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), None)
