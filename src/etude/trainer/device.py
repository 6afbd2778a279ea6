"""Choosing and preparing the device: cpu or cuda, threads, TF32 and attention kernels, determinism."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from etude.core import ConfigError
from etude.core.device import as_device


def resolve_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """Return the device that a config names; `auto` is CUDA where there is one.

    >>> resolve_device("cpu")
    device(type='cpu')

    Raises ConfigError if the device does not exist here.
    """
    device = as_device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if not torch.cuda.is_available() or device.index >= count:
            raise ConfigError(f"device '{name}' is not there ({count} CUDA devices found); use device: auto or cpu")
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device 'mps' is not there: this torch or this machine has none; use device: auto or cpu")
    elif device.type not in ("cpu", "mps"):
        raise ConfigError(f"device '{name}' cannot train; use cpu, cuda or cuda:N")
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a CUDA device is the current one: its random generator is the run's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def configure_cuda_performance() -> None:
    """Allow TF32 matrix products and cuDNN's, and flash and memory-efficient attention; harmless without CUDA."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cudnn.benchmark = True


def make_deterministic() -> None:
    """Use deterministic kernels only; an operation that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
