"""What a step costs on a CUDA device, for Etude and for the same step written by hand.

python -m benchmarks.gpu_step [--quick] [--json FILE]
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.table import Row, Table, publish, quartiles, read_options
from etude.engine.precision import Precision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, SupervisedTask
from etude.optim import AdamW

BATCH, WIDTH, DEPTH = 64, 512, 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).cuda()


def by_hand(*, fused: bool | None, read_loss: bool = False) -> Callable[[], None]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    x, y = torch.randn(BATCH, WIDTH, device="cuda"), torch.randint(10, (BATCH,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if read_loss and not norm.isfinite():  # what a check on the host costs
            return
        optimizer.step()

    return step


def etude_step(*, metrics: bool) -> Callable[[], None]:
    model = make_model()
    precision = Precision("bf16", torch.device("cuda"))
    updater = Updater(AdamW(model.parameters(), lr=1e-4), clip_norm=1.0, precision=precision)
    step = Step(model, SupervisedTask(ClassificationLoss()), updater, precision, metrics=metrics)
    batch = (torch.randn(BATCH, WIDTH, device="cuda"), torch.randint(10, (BATCH,), device="cuda"))
    return lambda: step([batch]) and None


def microseconds(step: Callable[[], None], steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e6


def main() -> None:
    options = read_options(__doc__ or "")
    if not torch.cuda.is_available():
        print("benchmarks.gpu_step needs a CUDA device")
        return
    rounds, steps = (5, 50) if options.quick else (40, 200)
    contestants = {
        "by hand, fused AdamW": by_hand(fused=True),
        "by hand, default AdamW": by_hand(fused=None),
        "by hand, fused, finiteness read by the host": by_hand(fused=True, read_loss=True),
        "Etude": etude_step(metrics=False),
        "Etude, with accuracy": etude_step(metrics=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            times[name].append(microseconds(step, steps))
    reference = times["by hand, fused AdamW"]
    rows: list[Row] = []
    for name, values in times.items():
        low, middle, high = quartiles(values)
        _, extra, _ = quartiles([mine - theirs for mine, theirs in zip(values, reference, strict=True)])
        ratio = quartiles([mine / theirs for mine, theirs in zip(values, reference, strict=True)])[1]
        rows.append({"loop": name, "µs": middle, "from": low, "to": high, "+µs": extra, "×": ratio})
    columns = {"loop": "", "µs": ".0f", "from": ".0f", "to": ".0f", "+µs": "+.0f", "×": ".2f"}
    title = f"One step on {torch.cuda.get_device_name()}: bf16, {DEPTH + 1} linear layers of {WIDTH}, batch {BATCH}"
    how = f"{rounds} interleaved rounds of {steps} steps; medians and quartiles of µs per step, paired differences."
    publish("gpu_step", [Table(title, columns, how, rows)], options, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
