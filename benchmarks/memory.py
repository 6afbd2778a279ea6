"""Time and peak memory of a pass, on the CPU or a GPU; a benchmark that measures itself in processes of its own."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.table import ROOT

MB = 1e6


def in_own_process(benchmark: str, arguments: list[str]) -> dict[str, float]:
    """Measure in a process of its own: the peak of a process does not go down again."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(command)}")
    return dict(json.loads(done.stdout))


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
