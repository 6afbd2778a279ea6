"""Finding the rank whose data the other ranks wait for."""

from statistics import median

from etude.distributed import World
from etude.engine.step_log import RunningSums

LEAST_S = 2.0
"""Seconds of training before anything is said."""
LEAST_SHARE = 0.25
"""Share of the time that a rank waits for its data, before others are said to wait for it."""


class SlowRank:
    """Compares how long the ranks have waited for their data, until one is found to be much slower."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seconds = self._waited = 0.0
        self._is_found = world.size == 1

    def add(self, window: RunningSums) -> None:
        """Add the times of this rank since the last log point."""
        self._seconds, self._waited = self._seconds + window.seconds, self._waited + window.waited

    def mine(self) -> list[int]:
        """Return what `find` needs of this rank, in microseconds: the maximum over ranks has the times of all."""
        if self._is_found:
            return []
        waits = [0] * self._world.size
        waits[self._world.rank] = int(1e6 * self._waited)
        return [int(1e6 * self._seconds), *waits]

    def find(self, maxima: list[int]) -> str:
        """Return a message about a slow rank, once and on every rank; empty if there is none."""
        if self._is_found:
            return ""
        seconds, *waits = (value / 1e6 for value in maxima)
        worst = max(waits)
        others = median(sorted(waits)[:-1])
        if seconds < LEAST_S or worst < LEAST_SHARE * seconds or worst < 2 * others:
            return ""
        self._is_found = True
        return (
            f"rank {waits.index(worst)} waits {worst / seconds:.0%} of the time for its data (others: "
            f"{others / seconds:.0%}), and all ranks wait for it; look at its disk and processor, or use more "
            "training.num_workers"
        )
