"""Recording what a function does on the device as a CUDA graph, and what a recording must know of its batches."""

import gc
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from etude.core.forms import parts_of
from etude.engine.host_state import PLAIN

T = TypeVar("T")

GPU_BOUND = 0.6
"""If the host needs at most this share of the device's time, recording would gain nothing."""


class Recorder(Protocol):
    """Records what a function does on the device, without doing it."""

    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Return what the function returned, in memory that every replay fills, and what replays it."""

    def recover(self) -> None:
        """Put the device in order after `record` has failed."""

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call a function; return its result and the host's time for it as a share of the device's."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: only one of them runs at a time.

    A pool whose last graph is gone takes no other one, as long as anything (a gradient, say) still lies in it.
    """

    recoveries: ClassVar[int] = 0
    """How often the generators were given another state: graphs of before, of any run, draw from the old one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Those that are in the pool."""

    def record(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        """Record the function on a stream of its own; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        with (
            no_collection(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            result = function()
        self._graphs.add(graph)
        return result, graph.replay

    def recover(self) -> None:
        """Wait for the device, and give the random generator a state that no failed recording holds."""
        torch.cuda.synchronize(self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        fresh = torch.Generator(self.device)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        CudaRecorder.recoveries += 1

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call it alone on the device, and wait for it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        begin.record()
        start = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - start
        end.record()
        end.synchronize()
        return result, 1e3 * seconds / max(begin.elapsed_time(end), 1e-6)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector away: it may free graphs of earlier runs, which no device allows while recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Unfit(Exception):
    """Why a step cannot be recorded, in words for people."""


def form_of(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return the shape of a batch: of tensors their sizes and types, of everything else its value.

    The tensors themselves are put into the list. Raises Unfit for objects whose values nobody knows.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        return type(value), *[form_of(one, tensors) for one in value]
    parts = parts_of(value)
    if parts is not None:
        return type(value), *parts, *[form_of(one, tensors) for one in parts.values()]
    if not isinstance(value, PLAIN):
        raise Unfit(f"batches hold a {type(value).__name__}, which may have tensors in it")
    return value


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with every change in place."""
    return -1 if tensor.is_inference() else tensor._version
