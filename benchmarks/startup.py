"""How long one waits before anything happens: imports, the command line, seeking into a large epoch.

python -m benchmarks.startup [--quick] [--no-peers] [--json FILE]
"""

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.table import (
    NOT_INSTALLED,
    NOT_RUN,
    Table,
    in_short,
    last_line,
    median,
    progress,
    publish,
    quartiles,
    read_options,
)
from etude.data import BatchSampler

BASE = "import torch"
SAMPLES = 10**9
ROUNDS, QUICK_ROUNDS = 7, 1
_PARTS = "import torch; model = torch.nn.Linear(8, 2); x, y = torch.rand(4, 8), torch.tensor([0, 1, 1, 0]); "
ONE_STEP = (
    f"{_PARTS}from etude import Trainer; "
    "Trainer(model, (x, y), config={'max_steps': 1}, progress=False, device='cpu').train()"
)
PLAIN_STEP = (
    f"{_PARTS}optimizer = torch.optim.AdamW(model.parameters()); "
    "torch.nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()"
)
OWN = {
    BASE: [sys.executable, "-c", "import torch"],
    "import etude": [sys.executable, "-c", "import etude"],
    "import torch, etude": [sys.executable, "-c", "import torch, etude"],
    "from etude import Trainer": [sys.executable, "-c", "from etude import Trainer"],
    "a step of Trainer": [sys.executable, "-c", ONE_STEP],
    "a step of torch alone": [sys.executable, "-c", PLAIN_STEP],
    "etude --help": [str(Path(sys.executable).with_name("etude")), "--help"],
}
PEERS = {
    "import lightning": ("lightning",),
    "from transformers import Trainer": ("transformers", "accelerate"),
    "import accelerate": ("accelerate",),
    "import ignite.engine": ("ignite",),
}
"""Each import, and what has to be installed for it."""


def seconds(command: Sequence[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def why_not(code: str, needs: Sequence[str]) -> str | None:
    """Return why this code does not run in a process of its own, None if it does: this process imports nothing."""
    if any(find_spec(module) is None for module in needs):
        return NOT_INSTALLED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return f"failed: {in_short(last_line(done.stderr))}" if done.returncode else None


def start_up(rounds: int, with_peers: bool) -> Table:
    """Return the time of each command in a new process, and what it adds to importing torch in the same round."""
    commands = dict(OWN)
    absent: dict[str, str] = {}
    for code, needs in PEERS.items() if with_peers else ():
        if why := why_not(code, needs):
            absent[code] = why
        else:
            commands[code] = [sys.executable, "-c", code]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for command in commands.values() if rounds > 1 else ():  # byte code and the disk cache
        seconds(command)
    for turn in range(rounds):
        for name, command in commands.items():
            progress(f"round {turn + 1} of {rounds}: {name}")
            times[name].append(seconds(command))
    progress("")
    table = Table(
        "Start-up: time of a new process.",
        {"command": "", "s": ".2f", "quartiles": "", "s over import torch": "+.2f"},
        f"Median of {rounds} rounds in which the commands take turns; the difference is taken within each round.",
    )
    for name, values in times.items():
        low, middle, high = quartiles(values)
        over = median([value - base for value, base in zip(values, times[BASE], strict=True)])
        table.rows.append(
            {
                "command": name,
                "s": middle,
                "quartiles": f"{low:.2f} … {high:.2f}",
                "s over import torch": None if name == BASE else over,
            }
        )
    table.rows.extend({"command": name, NOT_RUN: why} for name, why in absent.items())
    return table


def seeking(seeks: int) -> Table:
    """Return the time to find a batch anywhere in an epoch: a new sampler each time, as after a restart."""
    rng = random.Random(0)
    times = []
    for _ in range(seeks):
        epoch, position = rng.randrange(1000), rng.randrange(SAMPLES // 64) * 64
        begin = time.perf_counter()
        BatchSampler(SAMPLES, 64, seed=1).batch(epoch, position)
        times.append((time.perf_counter() - begin) * 1e3)
    table = Table(
        f"Seeking: the first batch of 64 at a random position of a shuffled epoch of {SAMPLES:.0e} samples.",
        {"sampler": "", "median ms": ".3f", "slowest ms": ".3f", "seeks": "d"},
        "A new sampler for each seek, as after a restart.",
    )
    table.rows.append(
        {
            "sampler": "etude.data.BatchSampler",
            "median ms": statistics.median(times),
            "slowest ms": max(times),
            "seeks": seeks,
        }
    )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options("How long one waits before anything happens.", argv)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    publish("startup", [start_up(rounds, options.peers), seeking(20 if options.quick else 1000)], options)


if __name__ == "__main__":
    main()
