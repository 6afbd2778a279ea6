"""Forks a writer that saves in a tight loop, kills it at a random moment, and looks at what is left; many times.

Run as a program (`checkpoint_killer.py ROOT KILLS SEED SIZE`), so that torch is imported once and forking is safe.
Prints one JSON line per kill.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from checkpoint_helpers import read_filled

from etude.checkpoint import CheckpointManager, newest_intact


def write_forever(root: Path, start: int, size: int, report: int) -> None:
    manager = CheckpointManager(root, keep_best=1)
    number = start
    while True:
        number += 1
        # Every third number goes under a step that is there already, so replacement is under fire too.
        step = number - 1 if number % 3 == 0 else number
        model = {"weight": torch.full((size,), float(number)), "bias": torch.full((3,), float(number))}
        state = {"momentum": {"weight": torch.full((size,), float(number))}, "number": number}
        manager.save(step, model_state=model, state=state, metrics={"val_loss": number % 5})
        os.write(report, number.to_bytes(8, "little"))


def kill_one(root: Path, start: int, size: int, rng: random.Random) -> dict[str, object]:
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            write_forever(root, start, size, writer)
        finally:
            os._exit(1)
    os.close(writer)
    finished = os.read(reader, 8)  # the first save has returned: from here on something must always be there
    time.sleep(rng.uniform(0, 3) * (time.monotonic() - began))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while more := os.read(reader, 8):
        finished = more
    os.close(reader)
    path, warnings = newest_intact(root)
    return {
        "killed": os.WIFSIGNALED(status),
        "finished": int.from_bytes(finished, "little"),
        "found": read_filled(path),
        "warnings": warnings,
        "left": sorted(p.name for p in root.iterdir() if p.name.startswith(".")),
    }


def main() -> None:
    root, kills, seed, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rng, start = random.Random(seed), 0
    for _ in range(kills):
        result = kill_one(root, start, size, rng)
        start = int(str(result["found"]))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
