"""Numbers of runs on the test split: python experiments/variable_stars/report.py RUN_DIR …

Runs of one way of training (both, ce, meaningful, by the names of their configs) are averaged.
"""

import sys
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from stars.results import tables
from stars.runs import numbers_of

from etude.core.errors import EtudeError
from etude.experiment import load_config


def main(folders: list[str]) -> int:
    if not folders:
        print(__doc__, file=sys.stderr)
        return 2
    runs: dict[str, list[dict[str, float]]] = {}
    try:
        for folder in map(Path, folders):
            name = load_config(folder / "config.yaml").name.rpartition("/")[2]
            runs.setdefault(name, []).append(numbers_of(folder))
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(tables(runs), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
