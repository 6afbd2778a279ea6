"""What the benchmarks share: options, medians, one plain table, and a JSON file with the circumstances."""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = (
    "etude",
    "torch",
    "numpy",
    "lightning",
    "torchmetrics",
    "accelerate",
    "transformers",
    "pytorch-ignite",
    "torchdata",
    "litdata",
    "datasets",
    "pandas",
    "pyarrow",
    "grain",
    "triton",
    "liger-kernel",
    "cut-cross-entropy",
)
NOT_INSTALLED = "not installed"
NOT_RUN = "not run"
"""Where a row without numbers has the reason."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One question and its answers."""

    title: str
    """What is measured."""
    columns: Mapping[str, str]
    """Format of each column's numbers, by name; the first column holds the names of the rows."""
    how: str
    """How it was measured."""
    rows: list[Row] = field(default_factory=list)
    """Numbers or words by column. A column that a row lacks is shown as a dash; one that all lack is left out. In a row
    with a reason under `NOT_RUN` the reason stands in place of the columns.
    """
    commit: str | None = None
    """Of what was measured, where it may differ from table to table."""

    def __str__(self) -> str:
        names = [name for name in self.columns if any(row.get(name) is not None for row in self.rows)]
        cells = [names] + [[cell(row.get(name), self.columns[name]) for name in names] for row in self.rows]
        widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
        lines = [
            "  ".join(text.rjust(width) if place else text.ljust(width) for place, (text, width) in enumerate(both))
            for both in (tuple(zip(line, widths, strict=True)) for line in cells)
        ]
        for place, row in enumerate(self.rows, 1):
            if NOT_RUN in row:
                lines[place] = f"{cells[place][0].ljust(widths[0])}  {row[NOT_RUN]}"
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), "", self.how])


def cell(value: Any, spec: str) -> str:
    """Return a value as it stands in the table.

    >>> cell(12.34, "+.1f"), cell(None, ".1f"), cell("not installed", ".1f")
    ('+12.3', '–', 'not installed')
    """
    if value is None:
        return "–"
    return value if isinstance(value, str) else format(value, spec)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median(values: Sequence[float | None]) -> float | None:
    """Return the median, or None if a value is missing (a counter that this machine lacks)."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def missing(modules: Sequence[str]) -> str | None:
    """Return why one of these modules cannot be imported, or None if all can; they are imported for that.

    Whatever an import raises is a reason: a package that is installed but does not fit the others here raises anything.

    >>> missing(["json"]), missing(["json", "no_such_module"])
    (None, 'not installed')
    """
    for module in modules:
        try:
            import_module(module)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                return NOT_INSTALLED
            return f"cannot be imported: {in_short(error)}"
    return None


def failure(run: Callable[[], object]) -> str | None:
    """Run a peer for the first time; return what it raised in short, or None if it runs.

    >>> failure(lambda: 1), failure(lambda: 1 / 0)
    (None, 'failed: ZeroDivisionError: division by zero')
    """
    try:
        run()
    except (Exception, SystemExit) as error:
        return f"failed: {in_short(error)}"
    return None


def in_short(error: BaseException | str) -> str:
    """Return an error as one line of at most 80 characters."""
    words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return textwrap.shorten(words, 80, placeholder=" …")


def last_line(text: str) -> str:
    """Return the last line of what a program wrote: of a traceback, the error."""
    return (text.strip().splitlines() or ["no output"])[-1]


def read_options(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return `quick`, `json` and `peers` as given on the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a tiny size that shows that it works; no good numbers")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out other trainers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE as well")
    return parser.parse_args(argv)


def take_device(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
    """Return the torch device that `--device` names, the CPU if it is not given, and the other arguments."""
    import torch

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    known, others = parser.parse_known_args(argv)
    return known.device, others


def publish(benchmark: str, tables: Sequence[Table], options: argparse.Namespace, *, device: str = "cpu") -> None:
    """Print the tables, and write them with their circumstances if a file was asked for."""
    for table in tables:
        print(f"\n{table}", flush=True)
    write(benchmark, tables, options, device=device)


def write(benchmark: str, tables: Sequence[Table], options: argparse.Namespace, *, device: str = "cpu") -> None:
    """Write the tables with their circumstances if a file was asked for."""
    if options.json is not None:
        report = {
            "benchmark": benchmark,
            "quick": options.quick,
            "environment": {"device": device, **environment()},
            "tables": [as_json(table) for table in tables],
        }
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def as_json(table: Table) -> dict[str, Any]:
    """Return a table as it is written."""
    own = {} if table.commit is None else {"commit": table.commit}
    return {"title": table.title, "how": table.how, **own, "rows": finite(table.rows)}


def read_tables(benchmark: str, options: argparse.Namespace) -> list[Table]:
    """Return the tables that were written to the file before, of the same benchmark and as quick or not."""
    if options.json is None or not options.json.exists():
        return []
    report = json.loads(options.json.read_text())
    if (report["benchmark"], report["quick"]) != (benchmark, options.quick):
        return []
    return [Table(columns={}, **one) for one in report["tables"]]


def finite(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows that JSON can hold: numbers that are not finite become null."""
    return [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def environment() -> dict[str, Any]:
    """Return what the numbers depend on: machine, versions, commit, threads."""
    import torch

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in DISTRIBUTIONS},
        "commit": commit(),
    }


def version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return NOT_INSTALLED


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str | None:
    """Return the commit of the checkout, with a mark if files have been changed since; None outside git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def progress(text: str) -> None:
    """Say on the terminal of whoever waits how far the benchmark is."""
    stream = sys.__stderr__
    if stream is not None and stream.isatty():
        stream.write(f"\r\x1b[2K{text}")
        stream.flush()
