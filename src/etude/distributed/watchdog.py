"""The watchdog of a run with several processes: a hung process ends all of them with one message.

A collective waits until every rank has called it. A rank that never does (an endless loop, a data loader that hangs, a
stopped process) would make the others wait forever. So a thread of every rank tells the others through the store,
which needs no collective, how far its rank is. If a rank has waited for `timeout_s` and no rank has made progress
meanwhile, all of them report where they are, one writes the message, and all exit.

| key in the store | value |
|---|---|
| `progress` | steps, batches of validations and collectives of all ranks together |
| `step/N` | the last step of rank N |
| `left/N` | how the training of rank N ended |
| `I/asked` | whether a rank has asked, for the I-th time, where the others are |
| `I/report/N`, `I/verdict` | the answers, and what follows from them: nothing, or a message |
| `I/ended` | the number of ranks that are ready to exit |
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from etude.core.clock import Clock
from etude.core.errors import TrainingError
from etude.core.run_layout import STACKS
from etude.distributed.stacks import place_of, stacks_of_all
from etude.distributed.world import World, progress_made
from etude.launched import HUNG, is_asked_to_stop, is_launched

T = TypeVar("T")
logger = logging.getLogger("etude")

_LONGEST_INTERVAL_S = 5.0
_BEATS = 20
"""Beats per timeout."""
_REPLY_S = 1.0
"""Least time for an answer of the store or of the other ranks."""
_END_S = 5.0
"""Time for callbacks to close their files before the process ends."""
STOP_S = 60.0
"""The longest timeout after a signal to stop: a scheduler soon kills what is left, without a message."""
_UNLIMITED = timedelta(days=7)
_started = 0
"""Watchdogs started in this process: every training has keys of its own."""


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank is."""

    rank: int
    step: int
    waits: bool
    may_take_long: bool
    where: str
    stacks: str


class Watchdog:
    """Watches one training, in a `with` block. A single process needs none, and gets none."""

    def __init__(
        self,
        world: World,
        clock: Clock,
        timeout_s: float,
        folder: Path | None = None,
        end: Callable[[TrainingError], None] | None = None,
    ) -> None:
        """`folder` gets the stacks; `end` is called, on every rank that can, before its process exits."""
        self._world, self._clock, self._timeout_s = world, clock, timeout_s
        self._is_stopping = False
        self._folder, self._end = folder, end
        self._interval_s = min(timeout_s / _BEATS, _LONGEST_INTERVAL_S)
        self._reply_s = max(_REPLY_S, 3 * self._interval_s)
        self._over = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._watch, name="etude-watchdog", daemon=True)
        self._watched = threading.get_ident()
        self._store: Any = None
        self._timeouts: list[tuple[Any, timedelta]] = []
        now = time.monotonic()
        self._mine, self._total, self._answered = 0, 0, 0
        self._beat_at, self._changed_at, self._waits_since = now, now, now

    def __enter__(self) -> "Watchdog":
        if self._world.size > 1 and self._world.store is not None:
            global _started
            _started += 1
            store = self._world.store.clone()  # a connection of its own: the other one may be in use while it waits
            self._store = PrefixStore(f"etude/watchdog/{_started}", store)
            self._suspend_timeouts()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.is_alive():
            return
        self._over.set()
        self._thread.join(None if self._is_ending else self._reply_s)  # None: the thread ends the process
        for backend, timeout in self._timeouts:
            backend._set_default_timeout(timeout)
        words = "had ended" if kind is None else f"failed before ({kind.__name__}: {error})"
        self._try(lambda store: store.set(f"left/{self._world.rank}", words))

    def _suspend_timeouts(self) -> None:
        """Let collectives wait as long as a rank saves or validates: their own timeouts know nothing of the others."""
        group = dist.group.WORLD
        backends = [] if group is None else [group._get_backend(device) for device in group._device_types]
        if self._world.host_group is not None and self._world.host_group is not group:
            backends += [self._world.host_group._get_backend(one) for one in self._world.host_group._device_types]
        for backend in backends:
            self._timeouts.append((backend, backend.options._timeout))
            backend._set_default_timeout(_UNLIMITED)

    # ------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        now, made = time.monotonic(), self._clock.step + progress_made()
        total = self._try(lambda store: self._exchange(store, made - self._mine))
        moved, self._mine = made != self._mine, made
        if now - self._beat_at > self._interval_s + self._reply_s:  # the whole job was suspended
            moved = True
        self._beat_at = now
        if moved or not place_of(self._watched).waits:
            self._waits_since = now
        if total is not None and total != self._total:
            self._total, self._changed_at = total, now
        if not self._is_stopping and is_asked_to_stop():
            self._is_stopping, self._changed_at = True, now
            self._timeout_s = min(self._timeout_s, STOP_S)
        is_late = now - max(self._waits_since, self._changed_at) >= self._timeout_s
        if is_late and self._store is None:
            self._finish(self._alone())
        inquiry = self._answered + 1
        if self._try(lambda store: store.add(f"{inquiry}/asked", int(is_late))):
            self._answered = inquiry
            self._answer(inquiry)
            self._changed_at = time.monotonic()

    def _exchange(self, store: Any, made: int) -> int:
        if made:
            store.set(f"step/{self._world.rank}", str(self._clock.step))
        return int(store.add("progress", made))

    def _try(self, action: Callable[[Any], T]) -> T | None:
        """Return what the store answers; None if it does not: the process that holds it is gone or stopped."""
        if (store := self._store) is None:
            return None
        found: list[T] = []

        def ask() -> None:
            try:
                found.append(action(store))
            except RuntimeError:
                self._store = None

        asking = threading.Thread(target=ask, daemon=True)  # a stopped process does not even refuse
        asking.start()
        asking.join(self._reply_s)
        if asking.is_alive():
            self._store = None
        return found[0] if found else None

    # ------------------------------------------------------------------------------------------------ a hung run

    def _answer(self, inquiry: int) -> None:
        """Report where this rank is; one rank decides from all reports what to do."""
        rank = self._world.rank
        place = place_of(self._watched)
        mine = Report(
            rank, self._clock.step, place.waits, place.may_take_long, place.where, stacks_of_all(self._watched)
        )
        self._try(lambda store: store.set(f"{inquiry}/report/{rank}", json.dumps(asdict(mine))))
        if self._try(lambda store: store.add(f"{inquiry}/judge", 1)) == 1:
            reports = self._reports(inquiry)
            message: str | None = self._judge(reports)
            verdict = json.dumps([message, len(reports)])
            self._try(lambda store: store.set(f"{inquiry}/verdict", verdict))
            is_judge, count = True, len(reports)
        else:
            found = self._read(f"{inquiry}/verdict", 2 * self._reply_s)
            message, count = (None, 1) if found is None else json.loads(found)
            is_judge = False
        if message is None:  # the judge is gone
            self._finish(self._alone())
        elif message:
            self._finish(message, reported=not is_judge, together=(f"{inquiry}/ended", count))

    def _read(self, key: str, limit_s: float) -> str | None:
        """Return the value of a key as soon as it is there; None if it is not in time."""
        deadline = time.monotonic() + limit_s
        while self._store is not None:
            if self._try(lambda store: store.check([key])):
                return self._try(lambda store: store.get(key).decode())
            if time.monotonic() > deadline:
                break
            time.sleep(self._interval_s / 5)
        return None

    def _reports(self, inquiry: int) -> dict[int, Report]:
        deadline = time.monotonic() + self._reply_s
        found: dict[int, Report] = {}
        for rank in range(self._world.size):
            text = self._read(f"{inquiry}/report/{rank}", deadline - time.monotonic())
            if text is not None:
                found[rank] = Report(**json.loads(text))
        return found

    def _judge(self, reports: dict[int, Report]) -> str:
        """Return the message about a hung run; empty if a rank is only slow: it saves or compiles, or nobody waits."""
        absent = [rank for rank in range(self._world.size) if rank not in reports]
        busy = [one for one in reports.values() if not one.waits]
        waiting = [one for one in reports.values() if one.waits]
        if any(one.may_take_long for one in busy) or not waiting:
            return ""
        all_wait = not busy and not absent
        if all_wait:
            last = min(one.step for one in waiting)
            busy = [one for one in waiting if one.step == last]
            waiting = [one for one in waiting if one.step != last]
        behind = [self._absent(rank) for rank in absent]
        behind += [f"rank {one.rank} is at step {one.step} in {one.where}" for one in busy]
        others = f"; {_ranks(one.rank for one in waiting)} in {waiting[0].where}" if waiting else ""
        return f"{self._headline()}: {_few(behind)}{others}; {self._write(reports)}{self._remedy(all_wait=all_wait)}"

    def _absent(self, rank: int) -> str:
        if (left := self._read(f"left/{rank}", 0.0)) is not None:
            return f"rank {rank} {left}"
        step = self._read(f"step/{rank}", 0.0) or "0"
        return (
            f"rank {rank} does not respond since step {step} (stopped, or its machine is gone): its stack is unknown"
        )

    def _alone(self) -> str:
        return (
            f"{self._headline()}: the process that holds the store, usually rank 0, does not respond; rank "
            f"{self._world.rank} waits at step {self._clock.step} in {place_of(self._watched).where}{self._remedy()}"
        )

    def _headline(self) -> str:
        asked = " after a signal to stop" if self._is_stopping else ""
        return f"the {self._world.size} processes made no progress for {self._timeout_s:g} s{asked}"

    def _remedy(self, *, all_wait: bool = False) -> str:
        if self._is_stopping:
            return "; resume from the last checkpoint"
        if all_wait:
            return (
                "; resume from the last checkpoint. All of them wait, for each other or for a device: the loss, and "
                "callbacks that request a stop, a save or a validation, must do the same on all ranks"
            )
        return (
            "; resume from the last checkpoint. If this may take so long, raise training.collective_timeout_s, or call "
            "etude.distributed.note_progress() in it now and then"
        )

    def _write(self, reports: dict[int, Report]) -> str:
        """Write the stacks of all ranks and say where; on standard error if there is no folder."""
        order = sorted(reports.values(), key=lambda one: (one.waits, one.rank))
        text = "\n".join(f"===== rank {one.rank}, step {one.step}\n{one.stacks}" for one in order)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / STACKS).write_text(text, encoding="utf-8")
                return f"all stacks are in {self._folder / STACKS}"
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return "all stacks are above"

    def _finish(self, message: str, *, reported: bool = False, together: tuple[str, int] | None = None) -> None:
        """Close the files of callbacks and end this process, whose main thread will never return.

        `together` is a counter of the ranks that are ready to end, and their number: a process that ends alone would
        be taken for the cause.
        """
        if self._over.is_set():  # the training has just ended by itself
            return
        self._is_ending = True
        error = TrainingError(message)
        error.reported_elsewhere = reported
        if self._end is not None:
            ending = threading.Thread(target=self._end, args=(error,), daemon=True)
            ending.start()
            ending.join(_END_S)
        if not reported:
            self._world.claim("failure")  # a connection that is lost from now on is not worth a message
            logger.error(message)
        if together is not None:
            self._wait_for_others(*together)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(HUNG if is_launched() else error.exit_code)

    def _wait_for_others(self, key: str, count: int) -> None:
        deadline = time.monotonic() + _END_S + self._reply_s
        ready = self._try(lambda store: store.add(key, 1))
        while ready not in (None, count) and time.monotonic() < deadline:
            time.sleep(self._interval_s / 5)
            ready = self._try(lambda store: store.add(key, 0))


def _ranks(ranks: Iterable[int]) -> str:
    found = list(map(str, ranks))
    if len(found) == 1:
        return f"rank {found[0]} waits"
    return f"ranks {', '.join(found[:4])}{' …' * (len(found) > 4)} wait"


def _few(words: list[str]) -> str:
    return "; ".join(words[:4]) + (f"; {len(words) - 4} more" if len(words) > 4 else "")
