"""Copies to a CUDA device beside the computation: pinned memory, a side stream, events instead of waiting."""

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import torch

from etude.core.batch import Batch, tensors_in

Item = tuple[int, Batch]
Staged = tuple[Item, torch.cuda.Event]


class SideStream:
    """Runs the making of batches on a stream of its own and hands each over when its copy is done.

    `send` wraps the maker of batches and may run in another thread; `receive` wraps what comes out and must be
    used where the batches are consumed. Neither makes the host wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Data that already lies on the device may still be being written by the stream in use now.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, items: Iterator[Item]) -> Generator[Staged, None, None]:
        """Take each item with all its device work on the side stream, and mark where that work ends."""
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
    """Return the items, `count` of them taken before they are asked for.

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
    """Tell the allocator that `stream` reads the batch, so its memory is not given away before that is done."""
    for tensor in tensors_in(batch):
        if tensor.is_cuda:
            tensor.record_stream(stream)
