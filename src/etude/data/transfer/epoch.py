"""The iterator over an epoch: batches prefetched by a thread or copied to CUDA in advance, with their position."""

from collections.abc import Callable, Generator, Iterator
from functools import partial

import torch

from etude.core.batch import Batch
from etude.data.transfer.cuda import SideStream, ahead
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
