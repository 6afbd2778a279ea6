"""Recording device work of a function as a CUDA graph, and the forms of batches that recordings are keyed by."""

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
from etude.core.random import GraphReplay
from etude.engine.host_state import PLAIN

T = TypeVar("T")

GPU_BOUND = 0.6
"""If the host needs at most this share of the device's time, recording gains a few percent at most."""


class Recorder(Protocol):
    """Records the device work of a function without running it."""

    def record(
        self, function: Callable[[], Tensor], random: GraphReplay | None = None
    ) -> tuple[Tensor, Callable[[], object]]:
        """Return the function's result, in memory that every replay fills, and a function that replays it.

        `random` is what the function draws random numbers again with.
        """

    def recover(self) -> None:
        """Make the device usable again after `record` has failed."""

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call a function; return its result, and the host's time for it as a share of the device's time."""

    def has_room(self) -> bool:
        """Whether as much memory is free as this process has: a recording keeps the memory of a step for itself."""


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: only one of them runs at a time.

    A pool whose last graph is gone cannot be reused while any tensor, such as a gradient, still lives in it.
    """

    recoveries: ClassVar[int] = 0
    """Number of times the generators got a new state: graphs recorded before that draw from the old one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Graphs in the pool."""

    def record(
        self, function: Callable[[], Tensor], random: GraphReplay | None = None
    ) -> tuple[Tensor, Callable[[], object]]:
        """Record the function on a stream of its own; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        if random is not None:
            graph.register_generator_state(random.state)
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        with (
            no_collection(),
            _no_workspaces(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            result = function()
        self._graphs.add(graph)
        if random is None:
            return result, graph.replay

        def replay() -> None:
            random.align()
            graph.replay()

        return result, replay

    def recover(self) -> None:
        """Wait for the device, and give the random generator a state that no failed recording holds."""
        torch.cuda.synchronize(self.device)
        generator = torch.cuda.default_generators[self.device.index or 0]
        fresh = torch.Generator(self.device)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        CudaRecorder.recoveries += 1

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call the function with an idle device, and wait for it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        start = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - start
        end.record()
        end.synchronize()
        return result, 1e3 * seconds / max(begin.elapsed_time(end), 1e-6)

    def has_room(self) -> bool:
        """Compare the device's free memory with what torch's allocator holds after the first steps."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free >= torch.cuda.memory_reserved(self.device)


@contextmanager
def _no_workspaces() -> Iterator[None]:
    """Free the memory that cuBLAS keeps for every stream: before a recording, and that of its stream after it.

    The recording's own is in the pool of its graph.
    """
    torch._C._cuda_clearCublasWorkspaces()
    yield
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector: it may free graphs of earlier runs, which is not allowed while recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Unfit(Exception):
    """The step cannot be captured; the message says why."""


def form_of(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return the form of a batch: shapes and dtypes of tensors, and the values of everything else.

    The tensors themselves are appended to the list. Raises Unfit for opaque objects.
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
    """Return the version of a tensor, which grows with every in-place change."""
    return -1 if tensor.is_inference() else tensor._version
