"""Memory and time of a linear layer with cross entropy, forward and backward: the plain formula and the chunked one.

python -m benchmarks.linear_ce [--device cpu|cuda] [--tokens N] [--vocabulary V] [--width D] [--quick] [--json FILE]
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import MB, in_own_process, memory, now, peak_memory
from benchmarks.table import Row, Table, median, progress, publish, read_options
from etude.losses import linear_cross_entropy

TOKENS = {"cuda": 32_768, "cpu": 4_096}
VOCABULARY, WIDTH = 50_257, {"cuda": 1024, "cpu": 256}
ROUNDS, REPEATS = 3, {"cuda": 20, "cpu": 1}


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels).sum


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain formula": plain, "chunked": chunked}
TYPES = {"float32": nullcontext, "bf16 autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16)}


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("tokens", "vocabulary", "width"):
        parser.add_argument(f"--{name}", type=int)
    own, rest = parser.parse_known_args()
    options = read_options(__doc__ or "", rest)
    device = torch.device(own.device)
    kind = device.type
    tokens = own.tokens or (1024 if options.quick else TOKENS[kind])
    vocabulary = own.vocabulary or (20_011 if options.quick else VOCABULARY)
    width = own.width or (16 if options.quick else WIDTH[kind])
    sizes = tokens, vocabulary, width
    repeats = 1 if options.quick else REPEATS[kind]
    found: dict[tuple[str, str], list[dict[str, float]]] = {(way, one): [] for one in TYPES for way in WAYS}
    for turn in range(1 if options.quick else ROUNDS):
        for way, one in found:
            progress(f"round {turn + 1}: {way}, {one}")
            found[way, one].append(in_own_process(measure, way, one, device, *sizes, repeats))
    progress("")
    publish("linear_ce", [table_of(found, sizes, own.device)], options, device=own.device)


def measure(
    way: str, kind: str, device: torch.device, tokens: int, vocabulary: int, width: int, repeats: int
) -> dict[str, float]:
    """Return peak memory and time of one forward and backward pass."""
    torch.manual_seed(0)
    context: AbstractContextManager[object] = TYPES[kind](device.type)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)

    def step(rows: int = tokens, classes: int = vocabulary) -> float:
        hidden.grad = weight.grad = None
        start = now(device)
        with context:
            loss = WAYS[way](hidden[:rows], weight[:classes], labels[:rows] % classes)
        loss.backward()
        return now(device) - start

    step(64, 128)  # loads the libraries
    hidden.grad = weight.grad = None
    inputs = memory(device)
    first = step()
    peak = peak_memory(device)
    grads = sum(one.grad.nbytes for one in (hidden, weight) if one.grad is not None)
    return {
        "extra": (peak - inputs - grads) / MB,
        "total": (peak - inputs + hidden.nbytes + weight.nbytes) / MB,
        "ms": 1e3 * min(first, *(step() for _ in range(repeats))),
    }


def table_of(found: dict[tuple[str, str], list[dict[str, float]]], sizes: tuple[int, int, int], device: str) -> Table:
    middle = {
        key: {name: median([run[name] for run in runs]) or 0.0 for name in runs[0]} for key, runs in found.items()
    }
    rows: list[Row] = []
    for (way, kind), mine in middle.items():
        theirs = middle["plain formula", kind]
        rows.append(
            {
                "way": f"{way}, {kind}",
                "extra MB": mine["extra"],
                "× less": theirs["extra"] / max(mine["extra"], 1e-3),
                "total MB": mine["total"],
                "× less in all": theirs["total"] / mine["total"],
                "ms": mine["ms"],
                "× time": mine["ms"] / theirs["ms"],
            }
        )
    columns = {"way": "", "extra MB": ".0f", "× less": ".1f", "total MB": ".0f", "× less in all": ".1f"}
    threads = f"{torch.get_num_threads()} thread(s)"
    name = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else threads
    title = "Linear layer and cross entropy, forward and backward: {:,} tokens × {:,} classes, {} wide".format(*sizes)
    how = (
        f"On {device} ({name}). Peak of one pass in a fresh process: extra is what it takes above inputs and "
        f"gradients, total is with them. Medians over {len(next(iter(found.values())))} processes, of the best time "
        f"in each."
    )
    return Table(title, {**columns, "ms": ".1f", "× time": ".2f"}, how, rows)


if __name__ == "__main__":
    main()
