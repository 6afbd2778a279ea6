"""The command `etude find-lr`: the curve of a learning-rate range test, and the override to train with."""

from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.process import complain, is_main

if TYPE_CHECKING:
    from etude.trainer.find_lr import RateSearch


def find_lr(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="lenet5/baseline, or the path of a YAML or JSON file.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as training.batch_size=32."),
    ] = None,
    min_lr: Annotated[float, typer.Option("--min", help="The first learning rate.")] = 1e-7,
    max_lr: Annotated[float, typer.Option("--max", help="The last learning rate.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps of the test; it ends early if the loss diverges.")] = 100,
    out: Annotated[
        Path | None, typer.Option(help="Also write a .png, .svg or .pdf (extra plot: matplotlib).")
    ] = None,
) -> None:
    """Find a learning rate: train a few steps with a rising rate. Nothing is written or kept."""
    if out is not None:
        from etude.runs.figures import check_figure

        check_figure(out)
    from etude.experiment import rate_finder

    found = rate_finder.find_lr(experiment, overrides or [], min_lr=min_lr, max_lr=max_lr, steps=steps)
    if not is_main():
        raise SystemExit(0 if found.overrides else 2)
    _draw(found.search, found.name, out)
    if not found.overrides:
        complain(found.search.explanation())
        raise SystemExit(2)
    keys = {_key(one) for one in found.overrides}
    kept = [one for one in overrides or [] if _key(one) not in keys]
    print(
        f"{found.search.explanation()}\ntrain with: {join(['etude', 'train', experiment, *kept, *found.overrides])}"
    )


def _key(override: str) -> str:
    key = override.partition("=")[0].strip()
    return "optimizer.lr" if key == "training.learning_rate" else key.replace("learning_rate", "lr")


def _draw(search: "RateSearch", name: str, out: Path | None) -> None:
    import numpy as np

    from etude.cli.runs import make_console, show_curves
    from etude.monitor.series import Series

    rates = np.array(search.rates)
    curve = Series("smoothed loss", rates, np.array(search.smoothed))
    console = make_console()
    console.print(f"smoothed loss by learning rate  {name}", style="bold")
    show_curves(console, [Series(curve.name, np.log10(rates), curve.y)], [name], "log10 of the learning rate")
    if out is not None:
        from etude.runs.figures import save_figure

        save_figure([curve], [name], out, x_label="learning rate", log_x=True)
        print(f"made {out}")
