"""What Etude adds to a step of several processes: DDP and FSDP2 against the same loop by hand, on the CPU (gloo).

python -m benchmarks.parallel [--quick] [--json FILE]
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.table import ROOT, Row, Table, progress, publish, quartiles, read_options
from etude import Callback, CausalTransformerLM, LeNet5, Trainer
from etude.core import StepReport
from etude.data import TensorData

PROCESSES, WARM_UP, STEPS = 2, 10, 60
COLUMNS = {
    "model": "",
    "layout": "",
    "by hand ms": ".2f",
    "etude ms": ".2f",
    "etude / by hand": ".3f",
    "quartiles": "",
}
Data = tuple[torch.Tensor, torch.Tensor]


def language() -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    model = CausalTransformerLM(vocab_size=1000, d_model=128, n_layers=4, n_heads=4, max_len=128, dropout=0.0)
    tokens = torch.randint(1000, (16 * STEPS, 129))
    return model, (tokens[:, :-1], tokens[:, 1:])


def vision() -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    number = 256 * STEPS
    return LeNet5(), (torch.randn(number, 1, 28, 28), torch.randint(10, (number,)))


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Data]], int]] = {
    "transformer, 0.9 M": (language, 16),
    "LeNet-5": (vision, 256),
}
"""How model and data are made, and the samples of a batch over all processes."""


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def by_hand(name: str, layout: str, steps: int) -> float:
    """Return the seconds of a step of a plain loop."""
    (make, batch), rank = MODELS[name], dist.get_rank()
    model, (x, y) = make()
    own = batch // PROCESSES
    if layout == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for param in model.parameters():
            param.data = param.data.contiguous()
        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        wrapped = fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
    start, order = 0.0, torch.randperm(len(x))
    for step in range(steps):
        if step == WARM_UP:
            start = time.perf_counter()
        first = step * batch + rank * own
        chosen = order[first : first + own]
        optimizer.zero_grad()
        loss_of(wrapped, x[chosen], y[chosen]).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
    return (time.perf_counter() - start) / (steps - WARM_UP)


class Clock(Callback):
    """Takes the time of the steps after the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.start, self.end = 0, 0.0, 0.0

    def on_step_end(self, report: StepReport) -> None:
        self.steps += 1
        self.end = time.perf_counter()
        if self.steps == WARM_UP:
            self.start = self.end


def with_etude(name: str, layout: str, steps: int) -> float:
    """Return the seconds of a step of a `Trainer`."""
    make, batch = MODELS[name]
    model, data = make()
    clock = Clock()
    config = {"max_steps": steps, "epochs": 1, "batch_size": batch, "device": "cpu", "learning_rate": 1e-3}
    Trainer(model, TensorData(*data), config=config, callbacks=[clock], parallel=layout, progress=False).train()
    return (clock.end - clock.start) / (clock.steps - WARM_UP)


def measure(steps: int, rounds: int) -> list[Row]:
    """Measure in this process, together with the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[Row] = []
    for name in MODELS:
        for layout in ("ddp", "fsdp"):
            times: list[tuple[float, float]] = []
            for _ in range(rounds):
                times.append((by_hand(name, layout, steps), with_etude(name, layout, steps)))
            low, middle, high = quartiles([mine / theirs for theirs, mine in times])
            theirs, mine = (quartiles([one[place] * 1e3 for one in times])[1] for place in (0, 1))
            row = {"model": name, "layout": layout, "by hand ms": theirs, "etude ms": mine, "etude / by hand": middle}
            rows.append({**row, "quartiles": f"{low:.3f} … {high:.3f}"})
    dist.destroy_process_group()
    return rows


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> None:
    if "RANK" in os.environ:
        rows = measure(int(os.environ["BENCH_STEPS"]), int(os.environ["BENCH_ROUNDS"]))
        if os.environ["RANK"] == "0":
            Path(os.environ["BENCH_OUT"]).write_text(json.dumps(rows))
        return
    options = read_options(__doc__ or "", argv)
    steps, rounds = (15, 1) if options.quick else (STEPS, 7)
    progress(f"{PROCESSES} processes")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        sizes = {
            "BENCH_STEPS": str(steps),
            "BENCH_ROUNDS": str(rounds),
            "BENCH_OUT": str(out),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(PROCESSES),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        command = [sys.executable, "-m", "benchmarks.parallel"]
        places = [{**sizes, "RANK": str(rank)} for rank in range(PROCESSES)]
        running = [subprocess.Popen(command, cwd=ROOT, env=os.environ | one) for one in places]
        if codes := [one for one in running if one.wait()]:
            raise SystemExit(f"{len(codes)} of {PROCESSES} processes failed")
        rows = json.loads(out.read_text())
    table = Table(
        "What Etude adds to a step of several processes",
        COLUMNS,
        f"{PROCESSES} processes, gloo, CPU, 1 thread each; median of {rounds} rounds in which both take turns, "
        f"{steps - WARM_UP} steps of one epoch each. By hand: DistributedDataParallel or fully_shard, shuffled data, "
        "mean loss, clip_grad_norm_, fused AdamW.",
    )
    table.rows.extend(rows)
    publish("parallel", [table], options)


if __name__ == "__main__":
    main()
