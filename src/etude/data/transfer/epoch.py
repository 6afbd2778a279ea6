"""The iterator over an epoch: batches prefetched by a thread or copied to CUDA in advance, with their position."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch

from etude.core.batch import Batch, tensors_in
from etude.core.spans import span
from etude.data.transfer.prefetch import prefetch_stream


class EpochIterator:
    """The batches of one epoch; `position` counts the samples returned so far over all ranks."""

    __slots__ = ("__weakref__", "_close", "_items", "is_closed", "position")

    def __init__(self, items: Iterator[tuple[int, Batch]], position: int, close: Callable[[], None]) -> None:
        self._items, self._close = items, close
        self.position = position
        self.is_closed = False

    def __iter__(self) -> "EpochIterator":
        return self

    def __next__(self) -> Batch:
        self.position, batch = next(self._items)
        return batch

    def close(self) -> None:
        """Stop prefetching; the iterator is then exhausted. Safe to call twice."""
        self._close()
        self._items = iter(())
        self.is_closed = True

    def go_on_as(self, other: "EpochIterator") -> None:
        """Continue with the batches of another iterator, from its position."""
        self._close()
        self._items, self._close, self.position = other._items, other._close, other.position


def deliver(
    items: Iterator[tuple[int, Batch]],
    batches: Iterator[Batch],
    position: int,
    *,
    prefetch: int,
    device: torch.device | None,
    threaded: bool,
) -> "EpochIterator":
    """Return the items, prefetched up to `prefetch`; `batches` is closed with the iterator.

    Without `threaded` batches are made in this thread; only their copies to a CUDA device are asynchronous.
    """
    to_cuda = device is not None and device.type == "cuda"
    if prefetch == 0 or not (threaded or to_cuda):
        return EpochIterator(items, position, partial(_close, batches))
    if not to_cuda:
        stream = prefetch_stream(items, prefetch)
        return EpochIterator(stream, position, stream.close)
    assert device is not None
    side = SideStream(device)
    if threaded:
        staged = prefetch_stream(side.send(items), prefetch)
        return EpochIterator(side.receive(staged), position, staged.close)
    staged_items = ahead(side.send(items), prefetch)
    return EpochIterator(side.receive(staged_items), position, partial(_close, batches))


def _close(batches: Iterator[Batch]) -> None:
    if isinstance(batches, Generator):
        batches.close()


Item = tuple[int, Batch]
Staged = tuple[Item, torch.cuda.Event]


class SideStream:
    """Creates batches on a side stream and returns each when its copy is complete.

    `send` wraps the producer of batches and may run in another thread; `receive` wraps its output and must be used by
    the consumer. Neither synchronises the host with the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)
        # The current stream may still be writing data that is already on the device.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, items: Iterator[Item]) -> Generator[Staged, None, None]:
        """Run all device work of each item on the side stream, and record an event at its end."""
        while True:
            with torch.cuda.stream(self.stream):
                try:
                    item = next(items)
                except StopIteration:
                    return
                done = self.stream.record_event()
            yield item, done

    def receive(self, staged: Iterator[Staged]) -> Generator[Item, None, None]:
        """Let the consumer's stream wait for each item, and keep its memory until that stream is done with it."""
        for item, done in staged:
            consumer = torch.cuda.current_stream(self.device)
            with span("transfer"):
                consumer.wait_event(done)
            _keep_for(item[1], consumer)
            yield item


def ahead(items: Iterator[Any], count: int) -> Generator[Any, None, None]:
    """Return the items, with `count` of them fetched in advance.

    >>> list(ahead(iter(range(4)), 2))
    [0, 1, 2, 3]
    """
    ready: deque[Any] = deque()
    for item in items:
        ready.append(item)
        if len(ready) > count:
            yield ready.popleft()
    yield from ready


def _keep_for(batch: Batch, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` reads the batch, so that its memory is not reused too early."""
    for tensor in tensors_in(batch):
        if tensor.is_cuda:
            tensor.record_stream(stream)
