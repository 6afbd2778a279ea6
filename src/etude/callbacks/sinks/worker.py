"""The thread of a sink: it takes events from a bounded queue, so that training never waits for a sink."""

import atexit
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from etude.monitor.events import Event

MOST_EVENTS = 10_000
"""Events that wait at most; if there are more, the oldest are dropped."""
PAUSE_S = 0.1
"""Usual seconds between two batches: events that come faster are written together."""


class Worker:
    """Calls `open`, then `write` with lists of events, then `close`, all on one thread.

    An error is put into `problems`, only the first of each function: the thread of the training passes it on. After
    an error of `open` nothing is written; after one of `write` the next events are tried.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], None],
        write: Callable[[list[Event]], None],
        close: Callable[[], None],
        pause_s: float = PAUSE_S,
    ) -> None:
        self.name, self.pause_s = name, pause_s
        self.problems: deque[str] = deque()
        self._open, self._write, self._close = open, write, close
        self._queue: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._told: set[str] = set()
        self._woken, self._hurry = threading.Event(), threading.Event()
        self._is_stopping = self._is_dead = False
        self._thread = threading.Thread(target=self._run, name=f"etude-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.stop, PAUSE_S)  # a program that never ends its run

    def put(self, event: Event) -> None:
        """Queue an event; never waits."""
        if self._is_dead:
            return
        if len(self._queue) == MOST_EVENTS:
            self._tell("full", f"events come faster than they are written; the oldest of {MOST_EVENTS} are dropped")
        self._queue.append(event)
        if not self._woken.is_set():
            self._woken.set()

    def hurry(self) -> None:
        """Write what waits at once: a checkpoint is being saved, from which a resumed run continues."""
        self._hurry.set()

    def stop(self, timeout_s: float) -> None:
        """Write what waits and end; after `timeout_s` the rest is given up."""
        atexit.unregister(self.stop)
        self._is_stopping = True
        self._hurry.set()
        self._woken.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._is_dead = True
            self._tell("slow", f"not done after {timeout_s:g} s; {len(self._queue)} events are lost")

    def _run(self) -> None:
        if not self._attempt("open", self._open, "nothing is written there"):
            self._is_dead = True
            return
        while not (self._is_stopping and not self._queue):
            self._woken.wait()
            self._woken.clear()
            events = [self._queue.popleft() for _ in range(len(self._queue))]
            if events:
                self._attempt("write", partial(self._write, events), "some events are lost there")
            if not self._is_stopping and self._hurry.wait(self.pause_s):
                self._hurry.clear()
        self._attempt("close", self._close, "its end is missing there")

    def _attempt(self, what: str, function: Callable[[], None], outcome: str) -> bool:
        try:
            function()
        except Exception as error:  # whatever another tool raises, training continues
            reason = " ".join(str(error).split())[:200]
            self._tell(what, f"{type(error).__name__}{f': {reason}' if reason else ''}; {outcome}")
            return False
        return True

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.problems.append(f"{self.name}: {message}; training continues")
