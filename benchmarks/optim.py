"""Time of one optimizer step: etude (kernel chosen by itself) against torch's default, foreach and fused.

    python benchmarks/optim.py [--rounds 25] [--threads 1]

All variants take turns within each round, so a change of clock speed meets them all; the table gives medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from etude.optim import SGD, AdamW, global_norm

MODELS = {
    "MLP 32-64-10, 4 tensors": ([(64, 32), (64,), (10, 64), (10,)], 100),
    "50 tensors of 100,000": ([(100_000,)] * 50, 2),
}
OPTIMIZERS = {
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 1e-3}),
    "SGD momentum 0.9": (SGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "SGD": (SGD, torch.optim.SGD, {"lr": 1e-3}),
}
VARIANTS = {"torch default": {}, "torch foreach": {"foreach": True}, "torch fused": {"fused": True}}


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def medians_us(functions: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Return the median time of one call of each function, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), median of {options.rounds} rounds, µs per call")
    print(
        f"\n| {'parameters':24} | {'call':17} | {'etude':>8} | "
        + " | ".join(f"{name:>22}" for name in VARIANTS)
        + " |"
    )
    print("|---" * (3 + len(VARIANTS)) + "|")
    for model, (shapes, calls) in MODELS.items():
        for name, (ours, theirs, arguments) in OPTIMIZERS.items():
            steps = {
                variant: theirs(parameters(shapes), **arguments, **kernel).step
                for variant, kernel in VARIANTS.items()
            }
            report(
                model,
                name,
                medians_us({"etude": ours(parameters(shapes), **arguments).step} | steps, options.rounds, calls),
            )
        grads = [param.grad for param in parameters(shapes) if param.grad is not None]
        norms = {"etude": lambda g=grads: global_norm(g), "torch default": lambda g=grads: nn.utils.get_total_norm(g)}
        report(model, "global norm", medians_us(norms, options.rounds, calls))


def report(model: str, call: str, times: dict[str, float]) -> None:
    """Print one row: etude's time, then each variant's with its ratio to etude's."""
    cells = [
        f"{times[name]:9.1f} ({times[name] / times['etude']:5.2f}×)" if name in times else "–" for name in VARIANTS
    ]
    print(f"| {model:24} | {call:17} | {times['etude']:8.1f} | " + " | ".join(f"{cell:>22}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
