"""How long a large CSV file takes to load, against pandas, pyarrow and polars, and with how much memory.

python -m benchmarks.csv_loading [--quick] [--no-peers] [--json FILE]
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.table import (
    NOT_INSTALLED,
    NOT_RUN,
    Table,
    in_short,
    last_line,
    median,
    progress,
    publish,
    read_options,
)

OWN = "Etude, with pyarrow"
WITHOUT = "Etude, without pyarrow"
BASE = "pandas.read_csv"
READERS = {
    OWN: "import pyarrow.csv\nfrom etude.data.catalog.tabular import load_csv\nread = lambda: load_csv(path, 'y')",
    WITHOUT: "import sys\nsys.modules['pyarrow'] = None\n"
    "from etude.data.catalog.tabular import load_csv\nread = lambda: load_csv(path, 'y')",
    BASE: "import pandas\nread = lambda: pandas.read_csv(path)",
    "pyarrow.csv.read_csv": "from pyarrow import csv\nread = lambda: csv.read_csv(path)",
    "polars.read_csv": "import polars\nread = lambda: polars.read_csv(path)",
}
NEEDS = {OWN: "pyarrow", BASE: "pandas", "pyarrow.csv.read_csv": "pyarrow", "polars.read_csv": "polars"}
MEASURED = """
import json, resource, time
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, begin, cpu = peak(), time.perf_counter(), time.process_time()
read()
print(json.dumps({"s": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "mb": peak() - before}))
"""
ROWS, QUICK_ROWS = 1_000_000, 500
ROUNDS, QUICK_ROUNDS = 7, 1


def write_file(path: Path, rows: int) -> None:
    """Write a table of 26 numbers of four forms, a whole number, two categories and a target."""
    source = np.random.default_rng(0)
    forms = ["{:.6f}", "{:.9g}", "{:.4f}", "{!r}"]
    with path.open("w") as file:
        file.write(",".join([*(f"x{place}" for place in range(26)), "count", "color", "size", "y"]) + "\n")
        for _ in range(rows):
            numbers = (source.normal(size=27) * np.logspace(-1, 3, 27)).tolist()
            cells = [forms[place % 4].format(number) for place, number in enumerate(numbers[:26])]
            picks = source.integers(0, (100_000, 4, 3)).tolist()
            words = [
                str(picks[0]),
                ("red", "green", "blue", "gray")[picks[1]],
                ("small", "medium", "large")[picks[2]],
            ]
            file.write(",".join([*cells, *words, f"{numbers[26]:.6f}"]) + "\n")


def measure(code: str, path: Path) -> dict[str, float]:
    """Run a reader in a process of its own; importing is not timed."""
    command = [sys.executable, "-c", f"path = {str(path)!r}\n{code}\n{MEASURED}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(in_short(last_line(done.stderr)))
    result: dict[str, float] = json.loads(last_line(done.stdout))
    return result


def loading(path: Path, rounds: int, with_peers: bool) -> Table:
    """Return the time and memory of each reader."""
    absent: dict[str, str] = {}
    found: dict[str, list[dict[str, float]]] = {}
    for name, code in READERS.items() if with_peers else [(WITHOUT, READERS[WITHOUT])]:
        try:
            if name in NEEDS and find_spec(NEEDS[name]) is None:
                raise RuntimeError(NOT_INSTALLED)
            measure(code, path)  # the file is in the page cache from here on
            found[name] = []
        except RuntimeError as error:
            absent[name] = str(error)
    for turn in range(rounds):
        for name, results in found.items():
            progress(f"round {turn + 1} of {rounds}: {name}")
            results.append(measure(READERS[name], path))
    progress("")
    size = path.stat().st_size / 2**20
    table = Table(
        f"Loading a CSV file of {size:,.0f} MB: 30 columns, two of them categories.",
        {"reader": "", "s": ".2f", "CPU s": ".2f", "times pandas": ".2f", "memory / file": ".2f"},
        f"Median of {rounds} rounds in which the readers take turns, each in a new process that has imported what it "
        "needs; ratios are taken within each round. Etude gives the standardised tensors that a config trains on, the "
        "others a table. Memory is the peak above that of the process before.",
    )
    for name, results in found.items():
        ratios = [one["s"] / base["s"] for one, base in zip(results, found.get(BASE, ()), strict=False)]
        row = {
            "reader": name,
            "s": median([one["s"] for one in results]),
            "CPU s": median([one["cpu"] for one in results]),
        }
        row |= {"times pandas": median(ratios), "memory / file": median([one["mb"] / size for one in results])}
        table.rows.append(row)
    table.rows.extend({"reader": name, NOT_RUN: why} for name, why in absent.items())
    return table


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options("How long a large CSV file takes to load.", argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write_file(path, QUICK_ROWS if options.quick else ROWS)
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        publish("csv_loading", [loading(path, rounds, options.peers)], options)


if __name__ == "__main__":
    main()
