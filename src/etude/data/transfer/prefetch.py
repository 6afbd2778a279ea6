"""Prefetching by one background thread with a bounded queue: the producer waits while the queue is full."""

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

_JOIN_TIMEOUT_S = 5.0


def prefetch_stream(source: Iterable[T], depth: int = 2) -> "PrefetchStream[T]":
    """Return the items of `source`, computed up to `depth` items ahead by a background thread.

    An error of the source is raised where its item would have come. The stream ends its thread when it is
    exhausted, closed, left as a context manager or garbage collected. Raises ValueError if depth < 1.

    >>> with prefetch_stream(range(3)) as stream:
    ...     list(stream)
    [0, 1, 2]
    """
    return PrefetchStream(source, depth)


class PrefetchStream(Generic[T]):
    """An iterator over items that a thread has ready; see `prefetch_stream`."""

    def __init__(self, source: Iterable[T], depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; a prefetch queue holds at least 1 item")
        self._queue: _Queue[T] = _Queue(depth)
        # The thread must not refer to the stream, or an abandoned stream would never be collected.
        self._thread = threading.Thread(
            target=_produce, args=(source, self._queue), name="etude-prefetch", daemon=True
        )
        weakref.finalize(self, self._queue.close)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._queue.get()

    def close(self) -> None:
        """Stop the thread and drop what it had ready; safe to call twice.

        A thread inside the source ends after the item it is computing; it is waited for, but not for ever.
        """
        self._queue.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> "PrefetchStream[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Queue(Generic[T]):
    """At most `depth` items, then either the end or an error."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        # The lock is re-entrant: a garbage collection inside a locked region may call `close`.
        self._changed = threading.Condition(threading.RLock())
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Wait until an item is wanted; False if none will be any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            return not self._closed

    def put(self, item: T) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, None if self._closed else error
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed, self._error = True, None
            self._items.clear()
            self._changed.notify_all()


def _produce(source: Iterable[T], queue: "_Queue[T]") -> None:
    """Run in the thread. The next item is begun only when there is room for it."""
    error: BaseException | None = None
    try:
        items = iter(source)
        try:
            while queue.wait_for_room():
                queue.put(next(items))
        except StopIteration:
            pass
        finally:
            if isinstance(items, Generator):
                items.close()
    except BaseException as caught:
        error = caught
    queue.end(error)
