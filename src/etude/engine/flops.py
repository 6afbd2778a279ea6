"""Floating-point operations: how many a model needs per token, and how many a device can do per second.

A training step takes about 6 FLOPs per token and weight: a multiplication and an addition in the forward pass, and
twice as many in the backward pass. Products of activations (attention) and recomputed activations are not counted.
"""

import functools
import re
import time

import torch
from torch import nn

TABLE: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    # name              16 bit   TF32    fp32     dense, in TFLOP/s; 16-bit products added up in fp32
    ("GB200", 2500.0, 1250.0, 80.0),
    ("B200", 2250.0, 1125.0, 75.0),
    ("GH200", 989.4, 494.7, 66.9),
    ("H200 NVL", 835.5, 417.7, 60.0),
    ("H200", 989.4, 494.7, 66.9),
    ("H100 PCIe", 756.0, 378.0, 51.2),
    ("H100 NVL", 835.5, 417.7, 60.0),
    ("H100", 989.4, 494.7, 66.9),
    ("H800 PCIe", 756.0, 378.0, 51.2),
    ("H800", 989.4, 494.7, 66.9),
    ("H20", 148.0, 74.0, 44.0),
    ("A100", 312.0, 156.0, 19.5),
    ("A800", 312.0, 156.0, 19.5),
    ("A40", 149.7, 74.8, 37.4),
    ("A30", 165.0, 82.0, 10.3),
    ("A10G", 70.0, 35.0, 31.2),
    ("A10", 125.0, 62.5, 31.2),
    ("L40S", 362.1, 183.2, 91.6),
    ("L40", 181.0, 90.5, 90.5),
    ("L4", 121.0, 60.0, 30.3),
    ("RTX 6000 Ada", 364.2, 182.1, 91.1),
    ("RTX A6000", 154.8, 77.4, 38.7),
    ("RTX 5090", 209.5, 104.8, 104.8),
    ("RTX 4090", 165.2, 82.6, 82.6),
    ("RTX 4080", 97.5, 48.7, 48.7),
    ("RTX 3090", 71.0, 35.6, 35.6),
    ("RTX 3080", 59.5, 29.8, 29.8),
    ("T4", 65.0, None, 8.1),
    ("V100 PCIE", 112.0, None, 14.0),
    ("V100", 125.0, None, 15.7),
    ("MI300X", 1307.4, 653.7, 163.4),
)
VARIANTS = frozenset({"ti", "super", "laptop", "max", "mig", "d"})
"""Suffixes that denote a different device."""
NO_BF16 = frozenset({"T4", "V100 PCIE", "V100"})

FLOPS_PER_WEIGHT = 6
"""FLOPs of a training step per token and weight."""
MEASURE_S = 0.05
SIDES = {"cpu": 512}
"""Side lengths of the matrices that are multiplied to measure a device; others use `DEVICE_SIDE`."""
DEVICE_SIDE = 4096


def matrix_parameters(model: nn.Module) -> int:
    """Return the number of parameters that every token is multiplied with: all but embedding tables.

    >>> matrix_parameters(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)))
    40
    """
    products = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - products
    return sum(param.numel() for param in model.parameters() if id(param) not in tables)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of matrix products in `dtype` on a device; TF32 is considered where it is enabled.

    The CPU and devices missing from the table are measured, once per process (about 0.05 s).
    """
    tf32 = device.type == "cuda" and dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if device.type == "cuda":
        known = listed_flops(torch.cuda.get_device_name(device), dtype, tf32=tf32)
        if known is not None:
            return known
    return _measured(device, dtype, tf32, torch.get_num_threads())


def listed_flops(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the data sheet value for a device of this name; None if it is not in the table.

    >>> listed_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16), listed_flops("NVIDIA A100-SXM4-80GB", torch.float32)
    (312000000000000.0, 19500000000000.0)
    >>> listed_flops("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16) is None
    True
    """
    words = set(_words(name))
    if words & VARIANTS:
        return None
    row = next((row for row in TABLE if words.issuperset(_words(row[0]))), None)
    if row is None:
        return None
    title, half, tf32_rate, single = row
    if dtype is torch.float32:
        rate = tf32_rate if tf32 and tf32_rate is not None else single
    elif dtype is torch.float16 or (dtype is torch.bfloat16 and title not in NO_BF16):
        rate = half
    else:
        rate = None
    return None if rate is None else rate * 1e12


def _words(name: str) -> list[str]:
    return re.split(r"[\s\-_/]+", name.lower())


@functools.lru_cache
def _measured(device: torch.device, dtype: torch.dtype, tf32: bool, threads: int) -> float:  # noqa: ARG001 - cached by
    """Return the best rate of a few large matrix products."""
    side = SIDES.get(device.type, DEVICE_SIDE)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        a = torch.full((side, side), 0.5, dtype=dtype, device=device)
        out = a @ a  # warm-up
        best, begin = float("inf"), time.perf_counter()
        _wait(device)
        while best == float("inf") or time.perf_counter() - begin < MEASURE_S:  # at least once, on a busy machine too
            start = time.perf_counter()
            torch.mm(a, a, out=out)
            _wait(device)
            best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
