"""Build the data of the experiment: python experiments/code_multitask/prepare.py [--inputs FOLDER …] [--out DIR]."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from code_tasks import DEFAULT_OUT, Options, prepare, read_schema, report

from etude.core.errors import EtudeError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = Options()
    parser.add_argument("--inputs", nargs="+", default=["stdlib"], help="files or folders of Python code, or stdlib")
    parser.add_argument("--out", default=DEFAULT_OUT, help="folder for the data (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=defaults.vocab_size, help="default: %(default)s")
    parser.add_argument(
        "--max-length", type=int, default=defaults.max_length, help="tokens of a sample (%(default)s)"
    )
    parser.add_argument("--max-files", type=int, help="take so many files of code and of tests, for a quick look")
    parser.add_argument("--validation", type=float, default=defaults.validation, help="share of the files")
    parser.add_argument("--test", type=float, default=defaults.test, help="share of the files")
    parser.add_argument("--overwrite", action="store_true", help="replace other data in the folder")
    parser.add_argument("--report", action="store_true", help="print the tables of labels of the data in --out")
    given = parser.parse_args(arguments)
    try:
        if given.report:
            print(report(read_schema(given.out)), end="")
            return 0
        options = Options(given.vocab_size, given.max_length, given.max_files, given.validation, given.test)
        start = time.monotonic()
        prepare(given.inputs, given.out, options, overwrite=given.overwrite, tell=_Teller(start))
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"the data is in {given.out} ({time.monotonic() - start:.0f} s); tables of its labels: --report")
    return 0


class _Teller:
    """Prints a line for each step, with the time."""

    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self.start:5.0f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
