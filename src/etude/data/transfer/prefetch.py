"""Prefetching by one background thread with a bounded queue: the producer waits while the queue is full."""

import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_JOIN_TIMEOUT_S = 5.0


def prefetch_stream(source: Iterable[T], depth: int = 2) -> "PrefetchStream[T]":
    """Return the items of `source`, computed up to `depth` items ahead by a background thread.

    An error of the source is raised in place of its item. The thread ends when the stream is exhausted, closed,
    exited as a context manager or garbage collected. Raises ValueError if depth < 1.

    >>> with prefetch_stream(range(3)) as stream:
    ...     list(stream)
    [0, 1, 2]
    """
    return PrefetchStream(source, depth)


class PrefetchStream(Generic[T]):
    """An iterator over items prepared by a thread; see `prefetch_stream`."""

    def __init__(self, source: Iterable[T], depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self._channel: _Channel[T] = _Channel(depth)
        # The thread must not refer to the stream, or an abandoned stream would never be collected.
        self._thread = threading.Thread(
            target=self._channel.produce, args=(source,), name="etude-prefetch", daemon=True
        )
        weakref.finalize(self, self._channel.close)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._channel.take()

    def close(self) -> None:
        """Stop the thread and drop its prepared items; safe to call twice.

        A thread inside the source ends after its current item; the wait for it is limited.
        """
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> "PrefetchStream[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Channel(Generic[T]):
    """Shared state of a stream and its thread. A garbage collection inside `get` may call `put` of the same queue."""

    def __init__(self, depth: int) -> None:
        self._room: SimpleQueue[None] = SimpleQueue()
        """One entry per requested item."""
        self._items: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
        """Items, then an error or None for the end."""
        self._is_closed = False
        for _ in range(depth):
            self._room.put(None)

    def produce(self, source: Iterable[T]) -> None:
        """Run in the thread. The next item is started only when there is space for it."""
        error: BaseException | None = None
        try:
            items = iter(source)
            try:
                while True:
                    self._room.get()
                    if self._is_closed:
                        break
                    self._items.put((next(items),))
            except StopIteration:
                pass
            finally:
                if isinstance(items, Generator):
                    items.close()
        except BaseException as caught:
            error = caught
        self._items.put(error)

    def take(self) -> T:
        """Return the next item, raise the error of the source, or StopIteration."""
        found = None if self._is_closed else self._items.get()
        if isinstance(found, tuple) and not self._is_closed:
            self._room.put(None)
            return found[0]
        is_late, self._is_closed = self._is_closed, True
        if isinstance(found, BaseException) and not is_late:
            raise found
        raise StopIteration

    def close(self) -> None:
        """Wake all waiting threads: the producer for space, a consumer for an item."""
        self._is_closed = True
        self._room.put(None)
        self._items.put(None)
