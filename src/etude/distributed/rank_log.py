"""Warnings of all ranks: rank 0 shows them, once, with the rank that they come from.

Rank 0 logs as a single process does. Warnings of other ranks wait until all ranks are at the same point, where those
that rank 0 has not logged itself are passed on to it. Errors, and warnings of a rank that fails, are printed at once.
"""

import contextlib
import hashlib
import json
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.distributed.world import World

logger = logging.getLogger("etude")


class RankLog(logging.Handler):
    """Collects the warnings of one rank."""

    def __init__(self, world: "World") -> None:
        super().__init__(logging.WARNING)
        self._world = world
        self._said: set[str] = set()
        """What rank 0 has logged or received."""
        self._held: list[str] = []

    def attach(self) -> None:
        """Listen to the logger of the library: to what rank 0 logs anyway, and instead of what others would print."""
        if self._world.is_main:
            logger.addFilter(self)
        else:
            logger.addHandler(self)

    def detach(self) -> None:
        """Stop listening."""
        logger.removeFilter(self)
        logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Hold a warning; print an error."""
        self.add(record.getMessage(), now=record.levelno >= logging.ERROR)

    def filter(self, record: logging.LogRecord) -> bool:
        """Note, on rank 0, what is logged there."""
        if self._world.is_main and record.levelno >= logging.WARNING:
            self.add(record.getMessage())
        return True

    def add(self, text: str, *, now: bool = False) -> None:
        """Note a warning of this rank."""
        if self._world.is_main:
            self._said.add(text)
            self._world.claim(_key(text))
        elif now:
            self._print(text)
        elif text not in self._held:
            self._held.append(text)

    @property
    def waiting(self) -> int:
        """The number of warnings that have not been passed on."""
        return len(self._held)

    def show(self) -> None:
        """Log on rank 0 what other ranks have to say; all ranks must call this together."""
        for line in self.exchange():
            logger.warning(line)

    def exchange(self) -> list[str]:
        """Return on rank 0 the new warnings of other ranks, with their rank; all ranks must call this together."""
        texts = self._world.gather_text(json.dumps(self._held))
        self._held.clear()
        new: dict[str, int] = {}
        for rank, text in enumerate(texts):
            for line in json.loads(text):
                new.setdefault(line, rank)
        fresh = {line: rank for line, rank in new.items() if line not in self._said}
        self._said |= fresh.keys()
        return [f"[rank {rank}] {line}" for line, rank in fresh.items()] if self._world.is_main else []

    def print_rest(self) -> None:
        """Print the warnings of a rank that fails, unless another one has printed the same."""
        for text in self._held:
            if self._world.claim(_key(text)):
                self._print(text)
        self._held.clear()

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stderr.write(f"etude: [rank {self._world.rank}] {text}\n")
            sys.stderr.flush()


def _key(text: str) -> str:
    return f"line/{hashlib.sha256(text.encode()).hexdigest()}"
