"""What a GPU does with whole trainings and single operations: by hand, in other trainers and in Etude.

python -m benchmarks.gpu [--quick] [--no-peers] [--json FILE] [--only PART]

The parts, and about how long they take on an H200 before anything is in a compiler's cache (less the second time):

gpt2        4 min     GPT-2 124M: tokens/s and peak memory
small       3 min     steps/s of LeNet-5, small GPTs and ResNet-18: eager, compiled, as CUDA graphs
linear      40 s      linear layer + cross entropy
meaningful  30 s      expected-value loss
documents   20 s      attention of packed documents
run         1 min     the command `etude train lenet5/lecun1998`
configs     15 min    the same, and every experiment with a config `gpu`, to their ends; only if it is asked for

`--only` may be given several times. Rows are printed, and written to FILE, as soon as they are known. Tables that are
in FILE already stay there, unless one with the same title is measured now: parts can be run one at a time. Without a
CUDA device, everything that can be is run at a tiny size on the CPU.
"""

import argparse
import time
from collections.abc import Callable, Sequence

from benchmarks.gpu_commands import configs_sections, kept_bytecode, run_sections
from benchmarks.gpu_kernels import documents_sections, linear_sections, meaningful_sections
from benchmarks.gpu_race import DEVICE, Section, child, run_section
from benchmarks.gpu_training import device_words, gpt2_sections, small_sections
from benchmarks.table import NOT_RUN, Row, Table, cell, commit, read_options, read_tables, write

PARTS: dict[str, Callable[..., list[Section]]] = {
    "gpt2": gpt2_sections,
    "small": small_sections,
    "linear": linear_sections,
    "meaningful": meaningful_sections,
    "documents": documents_sections,
    "run": run_sections,
    "configs": configs_sections,
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
    tables = read_tables("gpu", options)
    with kept_bytecode():
        for part in own.only or [name for name in PARTS if name != "configs"]:
            for place, section in enumerate(PARTS[part](quick=options.quick)):
                # On the CPU nothing can disturb others so much that a process for each would be worth its time.
                has_child = DEVICE.type == "cuda" and not section.starts_processes
                arguments = [f"--only={part}", f"--section={place}", *["--quick"] * options.quick]
                run_table(section, arguments if has_child else [], tables, options)


def run_table(section: Section, arguments: list[str], tables: list[Table], options: argparse.Namespace) -> None:
    """Run the contestants of a section; print and write every row at once, and the table at its end."""
    table = Table(section.title, section.columns, section.how, commit=commit())
    titles = [one.title for one in tables]
    place = titles.index(table.title) if table.title in titles else len(tables)
    tables[place : place + 1] = [table]
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
