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
from collections.abc import Callable, Iterator, Sequence
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

PROCESSES = 2
COLUMNS = {
    "model": "",
    "layout": "",
    "by hand ms": ".2f",
    "etude ms": ".2f",
    "etude / by hand": ".3f",
    "quartiles": "",
    "by CPU time": ".3f",
}
Data = tuple[torch.Tensor, torch.Tensor]


def language(steps: int) -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    model = CausalTransformerLM(vocab_size=1000, d_model=128, n_layers=4, n_heads=4, max_len=128, dropout=0.0)
    tokens = torch.randint(1000, (16 * steps, 129))
    return model, (tokens[:, :-1], tokens[:, 1:])


def vision(steps: int) -> tuple[nn.Module, Data]:
    torch.manual_seed(0)
    number = 256 * steps
    return LeNet5(), (torch.randn(number, 1, 28, 28), torch.randint(10, (number,)))


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Data]], int, int]] = {
    "transformer, 0.9 M": (language, 16, 4),
    "LeNet-5": (vision, 256, 25),
}
"""How model and data are made, the samples of a batch over all processes, and the steps of a turn."""
Times = tuple[float, float]
"""Seconds by the clock, and of the CPU."""


def now() -> Times:
    return time.perf_counter(), time.process_time()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def by_hand(name: str, layout: str, steps: int) -> Iterator[None]:
    """Make a step of a plain loop whenever it is asked for the next one."""
    (make, batch, _), rank = MODELS[name], dist.get_rank()
    model, (x, y) = make(steps)
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
    order = torch.randperm(len(x))
    for step in range(steps):
        first = step * batch + rank * own
        chosen = order[first : first + own]
        optimizer.zero_grad()
        loss_of(wrapped, x[chosen], y[chosen]).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        yield


class Turns(Callback):
    """After every turn of some steps, lets a loop by hand make as many."""

    def __init__(self, other: Iterator[None], turn: int) -> None:
        super().__init__()
        self.other, self.turn = other, turn
        self.steps, self.start = 0, now()
        self.mine: list[Times] = []
        self.theirs: list[Times] = []

    def on_step_end(self, report: StepReport) -> None:
        self.steps += 1
        if self.steps % self.turn == 0:
            self.mine.append(self.since())
            for _ in zip(range(self.turn), self.other, strict=False):
                pass
            self.theirs.append(self.since())

    def since(self) -> Times:
        """Return the time of a step since the last call, and begin anew together with the other processes."""
        end, start = now(), self.start
        dist.barrier()
        self.start = now()
        return (end[0] - start[0]) / self.turn, (end[1] - start[1]) / self.turn


def compare(name: str, layout: str, turns: int) -> list[tuple[Times, Times]]:
    """Return the times of a step of a `Trainer` and of the loop by hand, turn by turn, without the first one."""
    make, batch, turn = MODELS[name]
    steps = turn * (turns + 1)
    model, data = make(steps)
    clock = Turns(by_hand(name, layout, steps), turn)
    config = {"max_steps": steps, "epochs": 1, "batch_size": batch, "device": "cpu", "learning_rate": 1e-3}
    Trainer(model, TensorData(*data), config=config, callbacks=[clock], parallel=layout, progress=False).train()
    return list(zip(clock.mine, clock.theirs, strict=True))[1:]


def measure(turns: int, rounds: int) -> list[Row]:
    """Measure in this process, together with the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[Row] = []
    for name in MODELS:
        for layout in ("ddp", "fsdp"):
            pairs = [pair for _ in range(rounds) for pair in compare(name, layout, turns)]
            low, middle, high = quartiles([mine[0] / theirs[0] for mine, theirs in pairs])
            row = {"model": name, "layout": layout, "etude / by hand": middle, "quartiles": f"{low:.3f} … {high:.3f}"}
            for place, way in enumerate(("etude", "by hand")):
                row[f"{way} ms"] = quartiles([pair[place][0] * 1e3 for pair in pairs])[1]
            rows.append({**row, "by CPU time": quartiles([mine[1] / theirs[1] for mine, theirs in pairs])[1]})
    dist.destroy_process_group()
    return rows


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> None:
    if "RANK" in os.environ:
        rows = measure(int(os.environ["BENCH_TURNS"]), int(os.environ["BENCH_ROUNDS"]))
        if os.environ["RANK"] == "0":
            Path(os.environ["BENCH_OUT"]).write_text(json.dumps(rows))
        return
    options = read_options(__doc__ or "", argv)
    turns, rounds = (2, 1) if options.quick else (25, 3)
    progress(f"{PROCESSES} processes")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        sizes = {
            "BENCH_TURNS": str(turns),
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
        f"{PROCESSES} processes, gloo, CPU, 1 thread each; median of {rounds} runs of {turns} pairs of turns, "
        "4 steps of the transformer and 25 of LeNet-5 each. By hand: DistributedDataParallel or fully_shard, shuffled "
        "data, mean loss, clip_grad_norm_, fused AdamW.",
    )
    table.rows.extend(rows)
    publish("parallel", [table], options)


if __name__ == "__main__":
    main()
