"""A few steps under torch.profiler: the most expensive operators, memory by part, and a trace for Perfetto."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from etude.callbacks.recorder import memory_in_use, restart_peaks

MOST_OPERATORS = 10
MATRIX = ("mm", "bmm", "addmm", "baddbmm", "linear", "conv", "attention", "gemm")
"""Beginnings of words in the names of operators that are matrix products."""


@dataclass(slots=True)
class Operator:
    """An operator of the traced steps."""

    name: str
    calls: float
    """Per step."""
    ms: float
    """Per step: on the device if it is CUDA, else on the CPU; without the operators that it calls."""


@dataclass(slots=True)
class Memory:
    """The most memory in use in a part of the traced steps, in bytes."""

    allocated: int
    """By tensors on CUDA; on the CPU the resident memory of the process at the end of the part."""
    reserved: int = 0
    """By torch on CUDA."""


class Trace:
    """Steps that torch.profiler watches; they are slower than others, so their time is not that of the profile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: dict[str, Memory] = {}
        self.operators: list[Operator] = []
        self.matrix_ms = self.other_ms = self.copy_ms = 0.0
        """Per step: time of matrix products and convolutions, of all other operators, and of copies to CUDA."""
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)

    def begin(self) -> None:
        """Start torch.profiler."""
        with _quiet():
            self._profiler.start()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show a part in the trace, and measure its memory."""
        if self.device.type == "cuda":
            restart_peaks(self.device)
        with record_function(name):
            yield
        now, known = _memory(self.device), self.memory.get(name, Memory(0))
        self.memory[name] = Memory(max(now.allocated, known.allocated), max(now.reserved, known.reserved))

    def end(self, steps: int) -> None:
        """Stop torch.profiler and add up what it saw in so many steps."""
        self.stop()
        on_cuda = self.device.type == "cuda"
        found: list[Operator] = []
        for event in self._profiler.key_averages():
            if event.is_user_annotation or event.device_type != DeviceType.CPU:
                if event.device_type != DeviceType.CPU and "HtoD" in event.key:
                    self.copy_ms += event.self_device_time_total / 1e3 / steps
                continue
            micros = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            found.append(Operator(event.key, event.count / steps, micros / 1e3 / steps))
        found.sort(key=lambda one: -one.ms)
        self.operators = [one for one in found[:MOST_OPERATORS] if one.ms > 0]
        self.matrix_ms = sum(one.ms for one in found if _is_matrix(one.name))
        self.other_ms = sum(one.ms for one in found) - self.matrix_ms

    def write(self, path: Path) -> None:
        """Write the trace, as JSON in gzip."""
        self._profiler.export_chrome_trace(str(path))

    def stop(self) -> None:
        """Stop torch.profiler without looking at the result."""
        with _quiet():
            self._profiler.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the profiler's library prints to the terminal when it starts and stops."""
    with ExitStack() as stack:
        with suppress(OSError):  # there is no such output
            kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, kept)
            stack.callback(os.close, null)
            os.dup2(null, 2)
            stack.callback(os.dup2, kept, 2)
        yield


def _is_matrix(name: str) -> bool:
    return any(word.startswith(MATRIX) for word in name.lower().replace("::", "_").split("_"))


def _memory(device: torch.device) -> Memory:
    if device.type == "cuda":
        return Memory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return Memory(memory_in_use(device).get("memory_bytes", 0))
