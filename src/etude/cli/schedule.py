"""The command `etude schedule plot`."""

from pathlib import Path
from typing import Annotated

import typer

schedule_app = typer.Typer(help="Show the schedules of an experiment.", no_args_is_help=True)


@schedule_app.command("plot")
def plot(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="lenet5/baseline, or the path of a YAML or JSON file.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as training.epochs=3.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a .png, .svg or .pdf instead (extra plot: matplotlib).")
    ] = None,
) -> None:
    """Plot the learning rates, and other scheduled settings, over the steps of a run, without training."""
    from etude.experiment import load_experiment_config, schedule_curves

    config = load_experiment_config(experiment, overrides=overrides or [])
    curves, depends_on_metrics = schedule_curves(config)
    rates = [one for one in curves if one.name.partition("/")[0] == "lr"]
    panels = [rates, *([one] for one in curves if one not in rates)]
    if out is not None:
        from etude.runs.figures import save_panels

        save_panels(panels, out, x_label="step")
        print(f"made {out}")
    else:
        from etude.cli.runs import make_console, show_curves

        console = make_console()
        for panel in panels:
            console.print(panel[0].name, style="bold")
            show_curves(console, panel, [one.name for one in panel], x="step")
    if depends_on_metrics:
        print("the schedule reduces these rates by a metric, which is known only in training")
