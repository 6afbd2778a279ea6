"""How long does training wait for a checkpoint: written at once, in the background, and by two processes together?

python -m benchmarks.saving [--quick] [--json FILE] [--device cuda] [--folder DIR]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.table import ROOT, Row, Table, progress, publish, quartiles, read_options, take_device
from etude.checkpoint import CheckpointManager
from etude.checkpoint.background import BackgroundWriter
from etude.checkpoint.contents import Contents
from etude.distributed import World, join_world

MEGABYTES, ROUNDS = 500, 7
COLUMNS = {
    "way": "",
    "seconds": ".3f",
    "of a plain save": ".3f",
    "quartiles": "",
    "CPU seconds": ".3f",
    "then written for": ".2f",
}
TOGETHER = {"way": "", "seconds": ".3f", "of etude": ".3f", "quartiles": ""}
WAYS = ("etude", "dcp, safetensors", "dcp, own format")


def tensors(megabytes: int, device: torch.device) -> dict[str, Tensor]:
    """Return tensors of 10 MB each."""
    return {f"layer.{i}": torch.randn(1024, 2560, device=device) for i in range(max(1, megabytes // 10))}


def timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alone(megabytes: int, rounds: int, device: torch.device, folder: Path) -> Table:
    """Compare plain saves and saves in the background, by turns."""
    state, world = tensors(megabytes, device), World()
    manager, writer = CheckpointManager(folder / "alone", keep_best=0), BackgroundWriter()
    times: dict[str, list[float]] = {"at once": [], "in the background": [], "CPU": [], "thread": []}

    def start(step: int) -> None:
        contents = Contents.of(state, {}, manager.facts(step, {}, {}), "", world)
        writer.start(contents, lambda copy: manager.write(step, copy, world))

    first = timed(lambda: start(0), device)  # allocates the memory of the copy
    writer.wait()
    for turn in range(rounds):
        progress(f"{megabytes} MB: round {turn + 1} of {rounds}")
        plain = timed(lambda step=2 * turn + 1: manager.save(step, model_state=state, state={}), device)
        times["at once"].append(plain)
        begun = time.thread_time()
        times["in the background"].append(timed(lambda step=2 * turn + 2: start(step), device))
        times["CPU"].append(time.thread_time() - begun)
        times["thread"].append(timed(writer.wait, device))
    progress("")
    middle = quartiles(times["at once"])[1]
    shares = [one / other for one, other in zip(times["in the background"], times["at once"], strict=True)]
    low, share, high = quartiles(shares)
    rows: list[Row] = [
        {"way": "at once", "seconds": middle, "of a plain save": 1.0},
        {
            "way": "async_save",
            "seconds": quartiles(times["in the background"])[1],
            "of a plain save": share,
            "quartiles": f"{low:.3f} … {high:.3f}",
            "CPU seconds": quartiles(times["CPU"])[1],
            "then written for": quartiles(times["thread"])[1],
        },
        {"way": "async_save, the first", "seconds": first, "of a plain save": first / middle},
    ]
    how = (
        f"{rounds} rounds, by turns, medians. Seconds for which training waits for a checkpoint of {megabytes} MB on "
        f"{device.type}: files with checksums that are synced to disk, or the copy to host memory. The first copy "
        "allocates its memory. CPU seconds are those of the thread that trains: what other programs hardly disturb."
    )
    return Table("How long does training wait for a checkpoint?", COLUMNS, how, rows)


def race(megabytes: int, rounds: int, folder: Path) -> None:
    """Run in each of two processes: save tensors that are divided among them, in three ways by turns."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from etude.checkpoint.store import write_checkpoint

    world = join_world("cpu")
    mesh = init_device_mesh("cpu", (world.size,))
    state = {
        name: distribute_tensor(one, mesh, [Shard(0)])
        for name, one in tensors(megabytes, torch.device("cpu")).items()
    }
    calls: dict[str, Callable[[Path], object]] = {
        "etude": lambda path: write_checkpoint(path, state, {}, {}, world=world),
        "dcp, safetensors": lambda path: dcp.save(
            dict(state), storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True)
        ),
        "dcp, own format": lambda path: dcp.save(
            dict(state), storage_writer=dcp.FileSystemWriter(path, sync_files=True)
        ),
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            path = folder / f"{WAYS.index(way)}-{turn}"
            world.barrier()
            start = time.perf_counter()
            calls[way](path)
            world.barrier()
            if turn:  # the first round is not counted
                times[way].append(time.perf_counter() - start)
            if world.is_main:
                shutil.rmtree(path)
    if world.is_main:
        print(json.dumps(times))
    dist.destroy_process_group()


def together(megabytes: int, rounds: int, folder: Path) -> Table:
    """Compare with torch.distributed.checkpoint on two processes."""
    progress(f"{megabytes} MB by two processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    arguments = ["benchmarks.saving", f"--race={megabytes}", f"--rounds={rounds}", f"--folder={folder}"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    progress("")
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    times = json.loads(done.stdout.strip().splitlines()[-1])
    rows: list[Row] = []
    for way in WAYS:
        low, share, high = quartiles([one / other for one, other in zip(times[way], times["etude"], strict=True)])
        numbers = {} if way == "etude" else {"quartiles": f"{low:.3f} … {high:.3f}"}
        rows.append({"way": way, "seconds": quartiles(times[way])[1], "of etude": share, **numbers})
    how = (
        f"{rounds} rounds, by turns, medians, on the CPU. {megabytes} MB of DTensors, half on each process. Etude's "
        "files have SHA-256 checksums and are renamed into place; `dcp, safetensors` is HuggingFaceStorageWriter, "
        "which does neither; `dcp, own format` is FileSystemWriter with sync_files, whose metadata is pickled."
    )
    return Table("How long do two processes take to save what is divided among them?", TOGETHER, how, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--race", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    own, others = parser.parse_known_args(argv)
    if own.race is not None:
        race(own.race, own.rounds, own.folder)
        return
    device, others = take_device(others)
    options = read_options("How long does training wait for a checkpoint?", others)
    megabytes, rounds = (20, 1) if options.quick else (MEGABYTES, own.rounds)
    with tempfile.TemporaryDirectory(dir=own.folder) as name:
        folder = Path(name)
        tables = [alone(megabytes, rounds, device, folder), together(megabytes, rounds, folder)]
    publish("saving", tables, options, device=device.type)


if __name__ == "__main__":
    main()
