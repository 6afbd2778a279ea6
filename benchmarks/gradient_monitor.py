"""What the gradient monitor adds to a step at its default pace, and what one look costs.

python -m benchmarks.gradient_monitor [--quick] [--json FILE] [--device cuda]
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.table import Row, Table, progress, publish, quartiles, read_options, take_device
from etude.callbacks import GradientMonitor
from etude.callbacks.gradient_monitor import measure
from etude.engine.callback import Gradients
from etude.engine.precision import MixedPrecision
from etude.engine.step import Step
from etude.engine.update import Updater
from etude.losses import ClassificationLoss, LanguageModelingLoss, SupervisedTask
from etude.models import MLP, LeNet5
from etude.optim import AdamW

EVERY = GradientMonitor().every
COLUMNS = {
    "model": "",
    "parameters": ",d",
    "tensors": "d",
    "step µs": ".0f",
    "look µs": ".0f",
    "reading µs": ".0f",
    "hooks µs": ".2f",
    "% of a step": ".2f",
    "measured %": "+.2f",
    "quartiles": "",
}


class SmallTransformer(nn.Module):
    """Four layers of width 128 over 1,000 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 1000)

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(self.embedding(input_ids)))
        return output


def works(device: torch.device) -> dict[str, tuple[Callable[[], nn.Module], object, SupervisedTask]]:
    """Return, by name, how to make a model, a batch for it and its task."""
    classes = SupervisedTask(ClassificationLoss())
    return {
        "MLP 32-64-10, batch 64": (
            lambda: MLP(32, [64], 10),
            (torch.randn(64, 32, device=device), torch.randint(10, (64,), device=device)),
            classes,
        ),
        "LeNet-5, batch 64": (
            LeNet5,
            (torch.randn(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)),
            classes,
        ),
        "transformer 4×128, 4 × 64 tokens": (
            SmallTransformer,
            {"input_ids": torch.randint(1000, (4, 64), device=device)},
            SupervisedTask(LanguageModelingLoss()),
        ),
    }


def make_step(make: Callable[[], nn.Module], task: SupervisedTask, device: torch.device) -> Step:
    torch.manual_seed(0)
    model = make().to(device)
    precision = MixedPrecision("fp32", device)
    return Step(
        model, task, Updater(AdamW(model.parameters(), lr=1e-4), clip_norm=1.0, precision=precision), precision
    )


def stretch(step: Step, batch: object, monitor: GradientMonitor | None, steps: int) -> float:
    """Return the microseconds per step of some steps and one log point, which reads one number of them."""
    step.watchers = () if monitor is None else [monitor]
    wait(step)
    clock = time.perf_counter if step.updater.device.type == "cuda" else time.process_time
    start = clock()
    for _ in range(steps):
        if monitor is not None:
            monitor.on_step_begin(step.clock.step)
        report = step([batch])
        step.clock.step += 1
        if monitor is not None:
            monitor.on_step_end(report)
    float(report.norm)
    if monitor is not None:
        monitor.on_log({"skipped": 0.0})
    return (clock() - start) / steps * 1e6


def wait(step: Step) -> None:
    if step.updater.device.type == "cuda":
        torch.cuda.synchronize()


def microseconds(call: Callable[[], object], step: Step, calls: int) -> float:
    """Return the median time of a call, the device's part included."""
    times = []
    for _ in range(calls + 3):
        wait(step)
        start = time.perf_counter()
        call()
        wait(step)
        times.append((time.perf_counter() - start) * 1e6)
    return quartiles(times[3:])[1]


def row_of(name: str, work: tuple[Callable[[], nn.Module], object, SupervisedTask], size: tuple[int, int]) -> Row:
    make, batch, task = work
    rounds, steps = size
    device = next(value for value in (batch.values() if isinstance(batch, dict) else batch)).device
    step = make_step(make, task, device)
    stretch(step, batch, None, 5)
    monitor = GradientMonitor(every=steps if steps < EVERY else EVERY)
    plain, watched = [], []
    for turn in range(rounds):
        progress(f"{name}: round {turn + 1} of {rounds}")
        for with_monitor in (True, False) if turn % 2 else (False, True):
            time_us = stretch(step, batch, monitor if with_monitor else None, steps)
            (watched if with_monitor else plain).append(time_us)
    progress("")
    left = Gradients(step.model, (), 1.0, MixedPrecision("fp32"))
    look = microseconds(lambda: measure(left, 64.0, 1), step, 5 * rounds)
    both = microseconds(lambda: monitor.check(step.model), step, 5 * rounds)
    report = step([batch])
    idle = GradientMonitor(every=10**9)
    hooks = microseconds(
        lambda: (idle.on_step_begin(1), idle.wants_gradients(1), idle.on_step_end(report)), step, 1000
    )
    step_us = quartiles(plain)[1]
    low, middle, high = quartiles([(mine / base - 1) * 100 for mine, base in zip(watched, plain, strict=True)])
    return {
        "model": name,
        "parameters": sum(param.numel() for param in step.model.parameters()),
        "tensors": len(list(step.model.parameters())),
        "step µs": step_us,
        "look µs": look,
        "reading µs": max(0.0, both - look),
        "hooks µs": hooks,
        "% of a step": ((both / EVERY) + hooks) / step_us * 100,
        "measured %": middle,
        "quartiles": f"{low:+.1f} … {high:+.1f}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    device, given = take_device(argv)
    options = read_options("What the gradient monitor adds to a step.", given)
    torch.set_num_threads(1)
    size = (2, 4) if options.quick else (11, EVERY)
    table = Table(
        f"The gradient monitor at its default pace, a look every {EVERY} steps, fp32, one thread, on {device.type}.",
        COLUMNS,
        f"% of a step: (a look and its reading / {EVERY} + the hooks of a step in which nothing is due) / the step.\n"
        f"measured %: {size[0]} pairs of {size[1]} steps and a log point with and without it, in turns; median of the "
        f"ratios (on a CPU of its time, which other programs disturb less).\n"
        f"look: queues the kernels; reading: one transfer, and judging the layers, once at a log point.",
    )
    table.rows.extend(row_of(name, work, size) for name, work in works(device).items())
    publish("gradient_monitor", [table], options, device=device.type)


if __name__ == "__main__":
    main()
