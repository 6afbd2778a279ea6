"""Server-sent events: new records, events, media and states of runs reach the page within a second."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from etude.dashboard.alerts import Alerts
from etude.dashboard.catalogue import Run
from etude.dashboard.parsing import dumps, parse
from etude.dashboard.store import Store
from etude.dashboard.tail import MOST_BEHIND, Tail
from etude.monitor.reading import EVENTS, MEDIA, METRICS, size_of

POLL_S = 0.3
QUIET_S = 15.0
"""Seconds without news after which a comment shows that the connection is alive."""
_MOST_WAITING = 1000
_MOST_AT_ONCE = 100

Message = tuple[str, Any]


def as_event(kind: str, data: Any) -> bytes:
    """Return one server-sent event; JSON has no line breaks."""
    return b"event: " + kind.encode() + b"\ndata: " + dumps(data) + b"\n\n"


class Hub:
    """Sends messages to every open connection; may be called by any thread."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Message]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_watched(self) -> bool:
        """Whether a page is open."""
        return bool(self._queues)

    def connect(self) -> asyncio.Queue[Message]:
        """Return a queue of messages for a new connection."""
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Message] = asyncio.Queue(_MOST_WAITING)
        self._queues.add(queue)
        return queue

    def disconnect(self, queue: asyncio.Queue[Message]) -> None:
        """Forget a connection."""
        self._queues.discard(queue)

    def send(self, kind: str, data: Any) -> None:
        """Send a message to all; a page that does not read loses messages."""
        if self._loop is not None and self._queues and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, (kind, data))

    def _put(self, message: Message) -> None:
        for queue in self._queues:
            if not queue.full():
                queue.put_nowait(message)


class Subscription:
    """Follows the files of one run for one page."""

    def __init__(self, run: Run, store: Store, after: int | None) -> None:
        self.run, self._store = run, store
        self._metrics = Tail(run.path / METRICS, after)
        self._others = {"event": Tail(run.path / EVENTS), "media": Tail(run.path / MEDIA)}
        self._is_stale = after is not None and self._is_other(after)

    def _is_other(self, after: int) -> bool:
        """Whether the page has series of a file that was replaced since then, or is far behind."""
        size, series = size_of(self._metrics.path), self._store.known(self.run.key)
        was_replaced = series is not None and series.file is not None and series.file != self._metrics.file
        return was_replaced or after > size or size - after > MOST_BEHIND

    def poll(self) -> list[Message]:
        """Return what is new."""
        key = self.run.key
        messages: list[Message] = []
        lines = self._metrics.new_lines()
        if self._metrics.is_replaced or self._is_stale:
            self._is_stale = False
            self._metrics.to_end()
            messages.append(("restart", {"run": key}))
        elif lines:
            messages += self._points(lines)
        for kind, tail in self._others.items():
            lines = tail.new_lines()
            if not tail.is_replaced:
                messages += [(kind, {"run": key, "record": record}) for record in parse(lines)]
        return messages

    def _points(self, lines: bytes) -> list[Message]:
        series = self._store.known(self.run.key)
        by_split: dict[str, list[dict[str, Any]]] = {}
        for record in parse(lines):
            by_split.setdefault(str(record.get("split")), []).append(record)
        return [
            (
                "points",
                {
                    "run": self.run.key,
                    "split": split,
                    "records": records,
                    "elapsed": None if series is None else [series.elapsed(_time(one)) for one in records],
                    "cursor": self._metrics.offset,
                },
            )
            for split, records in by_split.items()
        ]


async def stream(
    hub: Hub, subscriptions: Callable[[], list[Subscription]], is_over: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield server-sent events until the page is closed or the server ends."""
    queue = hub.connect()
    try:
        yield b"retry: 1000\n\n"
        followed = await asyncio.to_thread(subscriptions)
        quiet = 0.0
        while not is_over():
            messages = await asyncio.to_thread(lambda: [one for each in followed for one in each.poll()])
            while not queue.empty():
                messages.append(queue.get_nowait())
            quiet = 0.0 if messages else quiet + POLL_S
            if messages:
                yield b"".join(as_event(*one) for one in messages)
            elif quiet >= QUIET_S:
                quiet = 0.0
                yield b": quiet\n\n"
            await asyncio.sleep(POLL_S)
    finally:
        hub.disconnect(queue)


class Watch:
    """Tells all pages about runs that changed, are new, or are gone; checks alerts."""

    def __init__(
        self,
        hub: Hub,
        all_runs: Callable[[], list[Run]],
        alerts: Alerts,
        describe: Callable[[Run], dict[str, Any]],
        sweeps: Callable[[list[Run]], list[dict[str, Any]]] = lambda _: [],
    ) -> None:
        self._hub, self._all_runs, self._alerts, self._describe = hub, all_runs, alerts, describe
        self._sweeps = sweeps
        self._last_sweeps: list[dict[str, Any]] = []
        self._last: dict[str, dict[str, Any]] = {}

    def poll(self) -> None:
        """Compare every run with what was last seen."""
        runs = {run.key: run for run in self._all_runs()}
        changed: list[dict[str, Any]] = []
        for key, run in runs.items():
            now = self._describe(run)
            if self._alerts.rules:
                self._alerts.check(run, now)
            if self._last.get(key) != now:
                self._last[key] = now
                changed.append(now)
            if len(changed) >= _MOST_AT_ONCE:
                self._hub.send("runs", changed)
                changed = []
        if changed:
            self._hub.send("runs", changed)
        removed = [key for key in self._last if key not in runs]
        for key in removed:
            del self._last[key]
        if removed:
            self._hub.send("removed", removed)
        if (sweeps := self._sweeps(list(runs.values()))) != self._last_sweeps:
            self._last_sweeps = sweeps
            self._hub.send("sweeps", sweeps)


def _time(record: dict[str, Any]) -> float:
    time = record.get("time")
    return float(time) if isinstance(time, (int, float)) else float("nan")
