"""`etude compare`: one model for all tasks against one model per task, or several weightings."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def compare(
    context: typer.Context,
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="An experiment with tasks, or the path of its file.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as training.epochs=3.")
    ] = None,
    weightings: Annotated[
        str | None,
        typer.Option(help="Compare these weightings instead, such as static,uncertainty,pcgrad."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs [default: runs/EXPERIMENT/compare or runs/EXPERIMENT/compare-weightings]."
        ),
    ] = None,
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
            help="Number of seeds, such as 5, from training.seed on, or a list, such as 0,1,2; one seed shows no "
            "significant difference [default: training.seed]."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live display.")] = False,
) -> None:
    """Compare a multi-task model with one model per task, or with itself under several weightings.

    The models have the same size and the same budget. If interrupted, run the command again to continue.
    """
    from etude.multitask.compare import compare_tasks, compare_weightings

    runner, changes = context.obj(), overrides or []
    options: dict[str, Any] = {"out": out, "seeds": _numbers(seeds), "progress": not quiet}
    options["tell"] = partial(typer.echo, err=True)
    if weightings is None:
        comparison = compare_tasks(runner, experiment, changes, budget=budget, **options)
    else:
        names = [name.strip() for name in weightings.split(",") if name.strip()]
        comparison = compare_weightings(runner, experiment, names, changes, **options)
    typer.echo(comparison.to_text())


def _numbers(text: str | None) -> list[int] | int | None:
    """Parse the seeds: a list, or a number of seeds.

    >>> _numbers("0, 1"), _numbers("3"), _numbers("7,")
    ([0, 1], 3, [7])
    """
    if text is None:
        return None
    from etude.core import ConfigError
    from etude.core.spelling import shorten

    is_list = "," in text
    try:
        seeds = [int(word) for word in text.removesuffix(",").split(",")]
    except ValueError:
        seeds = []
    low, high = (0, 2**63) if is_list else (1, 1000)
    if not seeds or not low <= min(seeds) <= max(seeds) < high or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"--seeds {shorten(text)}: pass distinct integers separated by commas, such as 0,1,2, or a number of "
            "seeds, such as 3"
        )
    return seeds if is_list else seeds[0]
