"""Asynchronous copies to a CUDA device: pinned memory, a side stream, events instead of synchronisation."""

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import torch

from etude.core.batch import Batch, tensors_in

Item = tuple[int, Batch]
Staged = tuple[Item, torch.cuda.Event]


class SideStream:
    """Creates batches on a side stream and returns each when its copy is complete.

    `send` wraps the producer of batches and may run in another thread; `receive` wraps its output and must be used by
    the consumer. Neither synchronises the host with the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
