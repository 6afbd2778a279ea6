"""Time and peak memory of a pass, on the CPU or a GPU, in a process of its own."""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

MB = 1e6


def in_own_process(measure: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """Measure in a process of its own: the peak of a process does not go down again."""
    context = multiprocessing.get_context("forkserver")  # it has imported the libraries and used none of them
    context.set_forkserver_preload(["torch", "etude.losses", "etude.models", "etude.multimodal"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, *arguments).result()


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: torch.device) -> float:
    """Return the bytes in use; where the system does not tell, the most this process has had so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else peak_memory(device)


def peak_memory(device: torch.device) -> float:
    """Return the most bytes that this process has had in use."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would tell that of the parent, if it was larger when this process was started
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
