"""What Lookahead and SAM cost beyond their arithmetic: a step of Etude against the same step written by hand.

python -m benchmarks.wrappers [--quick] [--json FILE]
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table import Row, Table, progress, publish, quartiles, read_options
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.models import MLP, LeNet5
from etude.optim import SAM, AdamW, Lookahead

K, ALPHA, RHO = 5, 0.5, 0.05
BATCH = 64
ROUNDS_OF_A_MODEL = 6
"""Then both models are made again: where their tensors lie in memory changes a short step by some per cent."""
COLUMNS = {
    "model": "",
    "optimizer": "",
    "by hand µs": ".0f",
    "etude µs": ".0f",
    "etude / by hand": ".3f",
    "quartiles": "",
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 32-64-10": (lambda: MLP(32, [64], 10), (32,)),
    "LeNet-5": (LeNet5, (1, 28, 28)),
    "MLP 512-1024-1024-10": (lambda: MLP(512, [1024, 1024], 10), (512,)),
}


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def optimizer_of(params: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def plain_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    params = list(model.parameters())
    optimizer = optimizer_of(params)

    def step() -> None:
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()

    return step


def lookahead_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    plain, count = plain_by_hand(model, x, y), 0
    fast = [param.data for param in model.parameters()]
    slow = [param.clone() for param in fast]

    def step() -> None:
        nonlocal count
        plain()
        count += 1
        if count % K == 0:
            torch._foreach_lerp_(slow, fast, ALPHA)
            torch._foreach_copy_(fast, slow)

    return step


def sam_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    params = list(model.parameters())
    weights, optimizer = [param.data for param in params], optimizer_of(params)
    kept = [weight.clone() for weight in weights]

    def step() -> None:
        optimizer.zero_grad()
        backward(model, x, y)
        grads = [param.grad for param in params if param.grad is not None]
        torch._foreach_copy_(kept, weights)
        torch._foreach_mul_(grads, RHO / (nn.utils.get_total_norm(grads) + 1e-12))
        torch._foreach_add_(weights, grads)
        optimizer.zero_grad()
        backward(model, x, y)
        torch._foreach_copy_(weights, kept)
        optimizer.step()

    return step


WAYS: dict[str, tuple[Callable[[AdamW], torch.optim.Optimizer], Callable[..., Callable[[], None]]]] = {
    "AdamW": (lambda inner: inner, plain_by_hand),
    "Lookahead": (lambda inner: Lookahead(inner, K, ALPHA), lookahead_by_hand),
    "SAM": (lambda inner: SAM(inner, RHO), sam_by_hand),
}


def steps_of(model: str, way: str) -> dict[str, Callable[[], object]]:
    """Return one step of Etude and one written by hand, on equal models and the same batch."""
    make, shape = MODELS[model]
    wrap, by_hand = WAYS[way]
    batch = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
    ours, theirs = make(), make()
    updater = Updater(wrap(AdamW(ours.parameters(), lr=1e-4)))
    step = Step(ours, SupervisedTask(ClassificationLoss()), updater, MixedPrecision("fp32"))
    return {"etude": lambda: step([batch]), "by hand": by_hand(theirs, *batch)}


def seconds(call: Callable[[], object], calls: int) -> float:
    """Return the CPU time of one call: other programs disturb it less than the clock."""
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls


def row_of(model: str, way: str, rounds: int, budget_s: float) -> Row:
    times: dict[str, list[float]] = {"etude": [], "by hand": []}
    for turn in range(rounds):
        progress(f"{model}, {way}: round {turn + 1} of {rounds}")
        if turn % ROUNDS_OF_A_MODEL == 0:
            calls = steps_of(model, way)
            for call in calls.values():
                seconds(call, 10)
            number = max(K, round(budget_s / seconds(calls["by hand"], 10) / K) * K)
        for name in sorted(calls, reverse=bool(turn % 2)):
            times[name].append(seconds(calls[name], number) * 1e6)
    progress("")
    low, middle, high = quartiles([mine / other for mine, other in zip(*times.values(), strict=True)])
    return {
        "model": model,
        "optimizer": way,
        "by hand µs": quartiles(times["by hand"])[1],
        "etude µs": quartiles(times["etude"])[1],
        "etude / by hand": middle,
        "quartiles": f"{low:.3f} … {high:.3f}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options("What Lookahead and SAM cost beyond their arithmetic.", argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds, budget_s = (2, 0.005) if options.quick else (120, 0.03)
    table = Table(
        f"A step with Lookahead (k {K}) and SAM around fused AdamW, batch {BATCH}, fp32, one thread, CPU.",
        COLUMNS,
        f"CPU time in {rounds} rounds, in turns; the ratio is the median of their ratios. Etude also checks that the "
        "update is finite, counts samples, and would skip a step; by hand does none of it.",
    )
    table.rows.extend(row_of(model, way, rounds, budget_s) for model in MODELS for way in WAYS)
    publish("wrappers", [table], options)


if __name__ == "__main__":
    main()
