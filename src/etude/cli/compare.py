"""`etude compare`: one model for all tasks against one model for each."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer


def compare(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="An experiment with tasks, or the path of its file.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Changes, such as training.epochs=3.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs [default: runs/EXPERIMENT/compare].")] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="share: a single-task model reads as many samples as the multi-task model read for its task; "
            "whole: it takes as many steps."
        ),
    ] = "share",
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds, such as 0,1,2,3,4; with one, no difference is called better [default: training.seed]."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live display.")] = False,
) -> None:
    """Compare a multi-task model with one model per task.

    The models have the same size and the same budget. Started again, the command goes on where it was stopped.
    """
    from etude.experiment import compare_tasks

    comparison = compare_tasks(
        experiment,
        overrides or [],
        out=out,
        budget=budget,
        seeds=_numbers(seeds),
        progress=not quiet,
        tell=lambda words: print(words, file=sys.stderr, flush=True),
    )
    print(comparison.to_text())


def _numbers(text: str | None) -> list[int] | None:
    """Read the seeds.

    >>> _numbers("0, 1")
    [0, 1]
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        from etude.core import ConfigError
        from etude.core.spelling import shorten

        raise ConfigError(f"--seeds {shorten(text)}: give whole numbers separated by commas, such as 0,1,2")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        from etude.core import ConfigError

        raise ConfigError(f"--seeds {text}: a seed is there twice, which would look like agreement; give each once")
    return seeds
