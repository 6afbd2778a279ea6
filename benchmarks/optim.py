"""Time of one optimizer step: etude (kernel chosen by itself) against torch's fastest implementation of the same.

python -m benchmarks.optim [--quick] [--json FILE] [--device cuda]
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.table import Row, Table, missing, progress, publish, quartiles, read_options, take_device
from etude.optim import (
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    NAdam,
    RAdam,
    RMSprop,
    ScheduleFreeAdamW,
    global_norm,
)
from etude.optim.muon import MatrixMuon

Shapes = list[tuple[int, ...]]
Step = Callable[[], object]
HIDDEN: Shapes = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
"""The matrices of GPT-2 124M's blocks."""
GPT2: Shapes = [(50257, 768), (1024, 768), *HIDDEN, *[(768,), (768,), (2304,), (3072,)] * 12, (768,), (768,)]
MODELS: Mapping[str, Mapping[str, tuple[Shapes, int]]] = {
    "cpu": {
        "MLP 32-64-10, 4 tensors": ([(64, 32), (64,), (10, 64), (10,)], 100),
        "50 tensors of 100,000": ([(100_000,)] * 50, 2),
    },
    "cuda": {"MLP 32-64-10, 4 tensors": ([(64, 32), (64,), (10, 64), (10,)], 100), "GPT-2 124M": (GPT2, 10)},
}
"""Shapes of parameters, and calls per round."""
KERNELS: tuple[Mapping[str, bool], ...] = ({}, {"foreach": True}, {"fused": True})
OPTIMIZERS: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 1e-3}),
    "Adam": (Adam, torch.optim.Adam, {"lr": 1e-3}),
    "SGD momentum 0.9": (SGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "SGD": (SGD, torch.optim.SGD, {"lr": 1e-3}),
    "RMSprop": (RMSprop, torch.optim.RMSprop, {"lr": 1e-3}),
    "Adagrad": (Adagrad, torch.optim.Adagrad, {"lr": 1e-3}),
    "NAdam": (NAdam, torch.optim.NAdam, {"lr": 1e-3}),
    "RAdam": (RAdam, torch.optim.RAdam, {"lr": 1e-3}),
    "Adafactor": (Adafactor, torch.optim.Adafactor, {"lr": 1e-3}),
    "Lion": (Lion, None, {"lr": 1e-4}),
    "schedule-free AdamW": (ScheduleFreeAdamW, "schedulefree", {"lr": 1e-3}),
}
COLUMNS = {
    "parameters": "",
    "call": "",
    "etude µs": ".1f",
    "fastest µs": ".1f",
    "fastest": "",
    "ratio": ".2f",
    "quartiles": "",
}


def parameters(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def peers(cls: Any, arguments: Mapping[str, Any], shapes: Shapes, device: torch.device) -> dict[str, Step]:
    """Return the steps of other implementations by name: torch's kernels, or another package."""
    if cls == "schedulefree":
        if missing(["schedulefree"]) is not None:
            return {}
        from schedulefree import AdamWScheduleFree

        made = AdamWScheduleFree(parameters(shapes, device), **arguments)
        made.train()
        return {"schedulefree": made.step}
    found: dict[str, Step] = {}
    for kernel in KERNELS if cls is not None else ():
        try:
            optimizer = cls(parameters(shapes, device), **arguments, **kernel)
            optimizer.step()
        except (TypeError, RuntimeError):  # there is no such kernel
            continue
        found[f"torch {next(iter(kernel), 'default')}"] = optimizer.step
    return found


def times_us(steps: Mapping[str, Step], rounds: int, calls: int, device: torch.device) -> dict[str, list[float]]:
    """Return the time of one call in every round, measured in turns; on a CPU its time, which others disturb less."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for step in steps.values():
        for _ in range(3):
            step()
    for turn in range(rounds):
        for name, step in sorted(steps.items(), reverse=bool(turn % 2)):
            _wait(device)
            start = clock()
            for _ in range(calls):
                step()
            _wait(device)
            found[name].append((clock() - start) / calls * 1e6)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def row_of(model: str, call: str, steps: Mapping[str, Step], rounds: int, calls: int, device: torch.device) -> Row:
    """Return etude's time, that of the fastest peer, and the ratio of the two in each round."""
    progress(f"{model}: {call}")
    times = times_us(steps, rounds, calls, device)
    mine = times.pop("etude")
    row = {"parameters": model, "call": call, "etude µs": quartiles(mine)[1]}
    if not times:
        return row
    best = min(times, key=lambda name: quartiles(times[name])[1])
    low, middle, high = quartiles([one / other for one, other in zip(mine, times[best], strict=True)])
    return {
        **row,
        "fastest µs": quartiles(times[best])[1],
        "fastest": best,
        "ratio": middle,
        "quartiles": f"{low:.2f} … {high:.2f}",
    }


def muon_row(device: torch.device, rounds: int, options: Mapping[str, bool], *, quick: bool) -> Row:
    """Return the times of Muon on hidden matrices."""
    shapes = [(48, 32), (32, 48)] * 3 if quick else HIDDEN
    mine = MatrixMuon(parameters(shapes, device), 1e-3, **options)
    theirs = torch.optim.Muon(parameters(shapes, device), lr=1e-3, adjust_lr_fn="match_rms_adamw")
    steps: dict[str, Step] = {"etude": mine.step, "torch.optim.Muon": theirs.step}
    call = " ".join(["Muon", *options])
    return row_of("hidden matrices of GPT-2 124M", call, steps, rounds, 2, device)


def main(argv: Sequence[str] | None = None) -> None:
    device, given = take_device(argv)
    options = read_options("Time of one optimizer step.", given)
    torch.set_num_threads(1)
    rounds = 2 if options.quick else 15
    table = Table(
        f"One optimizer step, fp32, one thread, on {device.type}.",
        COLUMNS,
        f"Median of {rounds} rounds, in which all variants take turns; ratio: etude's time divided by that of the "
        "fastest\nof torch's default, foreach and fused kernels (schedule-free AdamW: of the package schedulefree).",
    )
    for model, (shapes, calls) in MODELS[device.type].items():
        for name, (ours, theirs, arguments) in OPTIMIZERS.items():
            steps = {"etude": ours(parameters(shapes, device), **arguments).step}
            steps |= peers(theirs, arguments, shapes, device)
            table.rows.append(row_of(model, name, steps, rounds, 1 if options.quick else calls, device))
            del steps
        grads = [param.grad for param in parameters(shapes, device) if param.grad is not None]
        norms: dict[str, Step] = {
            "etude": lambda g=grads: global_norm(g),
            "torch default": lambda g=grads: nn.utils.get_total_norm(g),
        }
        table.rows.append(row_of(model, "global norm", norms, rounds, 1 if options.quick else calls, device))
    if options.quick or device.type == "cuda":
        table.rows.append(muon_row(device, rounds, {}, quick=options.quick))
        table.rows.append(muon_row(device, rounds, {"normuon": True}, quick=options.quick))
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    publish("optim", [table], options, device=name)


if __name__ == "__main__":
    main()
