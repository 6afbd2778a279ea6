"""Runs every benchmark, each in a process of its own, and prints their tables.

python -m benchmarks [--quick] [--no-peers] [--json FOLDER]
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.table import ROOT

BENCHMARKS = {
    "overhead": (),
    "resume": (),
    "saving": (),
    "parallel": (),
    "startup": (),
    "loader": ("--rounds=1", "--samples=2000"),
    "token_loader": (),
    "csv_loading": (),
    "dashboard": (),
    "optim": (),
    "wrappers": (),
    "metrics": (),
    "gradient_monitor": (),
    "sinks": (),
    "linear_ce": (),
    "meaningful": (),
    "multi_task": (),
    "advice": (),
    "gpu": (),
}
"""Modules in the order in which they run, and what `--quick` is for those that do not know the word."""


def arguments_of(name: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments that one benchmark is given."""
    sizes = BENCHMARKS[name]
    if sizes:
        return list(sizes) if options.quick else []
    arguments = ["--quick"] * options.quick + ["--no-peers"] * (not options.peers)
    return arguments + ([f"--json={options.json / name}.json"] if options.json is not None else [])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run every benchmark.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes that show that it works; no good numbers")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out other trainers")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the numbers to FOLDER/NAME.json as well")
    options = parser.parse_args()
    if options.json is not None:
        options.json = options.json.resolve()
        options.json.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in BENCHMARKS:
        begin = time.perf_counter()
        print(f"\n=== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments_of(name, options)]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
        print(f"\n({time.perf_counter() - begin:.0f} s)", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
