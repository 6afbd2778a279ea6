"""Train with cross entropy, expected values and both, three seeds each, and print the tables and a picture.

    python experiments/variable_stars/compare.py [--out runs/variable_stars/compare] [section.key=value …]

What is finished there is not trained again, what was interrupted goes on. The picture is curves.svg in that folder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from plot_curves import picture_of
from stars.results import tables
from stars.runs import WAYS, finished_run, numbers_of

from etude.core.errors import EtudeError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/variable_stars/compare"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, as for etude train")
    given = parser.parse_args(arguments)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    try:
        for seed in range(given.seeds):
            for way in WAYS:
                folder = finished_run(way, seed, given.out, given.overrides)
                runs[way].append(numbers_of(folder))
                print(f"{folder}: done", file=sys.stderr, flush=True)
        picture = picture_of([given.out / f"{way}-0" for way in WAYS])
        (given.out / "curves.svg").write_text(picture, encoding="utf-8")
        report = tables(runs)
        (given.out / "results.md").write_text(report, encoding="utf-8")
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(report, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
