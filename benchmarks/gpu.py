"""What a GPU does with whole trainings and single operations: by hand, in other trainers and in Etude.

python -m benchmarks.gpu [--quick] [--no-peers] [--json FILE] [--only PART]

The parts, and about how long they take on an H200 before anything is in a compiler's cache (less the second time):

gpt2        4 min     GPT-2 124M: tokens/s and peak memory
small       3 min     steps/s of LeNet-5, small GPTs and ResNet-18: eager, compiled, as CUDA graphs
linear      40 s      linear layer + cross entropy
meaningful  30 s      expected-value loss
documents   20 s      attention of packed documents
run         30 s      the command `etude train lenet5/lecun1998`

`--only` may be given several times. Rows are printed, and written to FILE, as soon as they are known. Without a CUDA
device, everything that can be is run at a tiny size on the CPU.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from benchmarks.gpu_kernels import documents_sections, linear_sections, meaningful_sections
from benchmarks.gpu_race import DEVICE, Contestant, Section, child, run_section
from benchmarks.gpu_training import device_words, gpt2_sections, small_sections
from benchmarks.table import NOT_RUN, ROOT, Row, Table, cell, last_line, read_options, write
from etude.core import DataError
from etude.data.mnist import fetch_mnist

RUN = ("train", "lenet5/lecun1998")


def whole_run() -> dict[str, float]:
    """Return the seconds of a whole run by the command line."""
    try:
        fetch_mnist(download=False)
    except DataError as error:
        raise RuntimeError("the MNIST files are not here") from error
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "etude", *RUN, "--run-dir", f"{folder}/run"]
        begin = time.perf_counter()
        done = subprocess.run([*command, "training.capture=auto"], cwd=ROOT, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(last_line(done.stderr or done.stdout))
    return {"s": seconds}


def run_sections(*, quick: bool) -> list[Section]:
    """Return the table of the whole command."""
    title = f"The whole command on {device_words()}"
    command = f"etude {' '.join(RUN)}"
    how = "Seconds from the start of the process to its end, with 15 epochs, validation and checkpoints."
    contestants = {command: Contestant(whole_run)}
    return [Section(title, {"command": "", "s": ".1f"}, how, contestants, ("s", "×"), lambda _: (), alone=True)]


PARTS: dict[str, Callable[..., list[Section]]] = {
    "gpt2": gpt2_sections,
    "small": small_sections,
    "linear": linear_sections,
    "meaningful": meaningful_sections,
    "documents": documents_sections,
    "run": run_sections,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", action="append", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--section", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    own, rest = parser.parse_known_args(argv)
    options = read_options(__doc__ or "", rest)
    options.quick = options.quick or DEVICE.type != "cuda"
    if own.run is not None:
        child(PARTS[own.only[0]](quick=options.quick)[own.section], own.run)
        return
    tables: list[Table] = []
    for part in own.only or PARTS:
        for place, section in enumerate(PARTS[part](quick=options.quick)):
            # On the CPU nothing can disturb others so much that a process for each would be worth its time.
            arguments = [f"--only={part}", f"--section={place}", *["--quick"] * options.quick]
            run_table(section, arguments if DEVICE.type == "cuda" else [], tables, options)


def run_table(section: Section, arguments: list[str], tables: list[Table], options: argparse.Namespace) -> None:
    """Run the contestants of a section; print and write every row at once, and the table at its end."""
    table = Table(section.title, section.columns, section.how)
    tables.append(table)
    label = next(iter(section.columns))
    print(f"\n{section.title} …", flush=True)
    found: dict[str, Row] = {}
    begin = time.perf_counter()
    for name, numbers in run_section(section, arguments, peers=options.peers):
        found[name] = {label: name, **numbers}
        table.rows[:] = section.with_ratios([found[name] for name in section.contestants if name in found])
        shown = [f"{key} {cell(numbers[key], spec)}" for key, spec in section.columns.items() if key in numbers]
        print(
            f"  {time.perf_counter() - begin:4.0f} s  {name}: {numbers.get(NOT_RUN) or ', '.join(shown)}", flush=True
        )
        write("gpu", tables, options, device=device_words())
    print(f"\n{table}", flush=True)


if __name__ == "__main__":
    main()
