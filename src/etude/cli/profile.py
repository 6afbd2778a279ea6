"""The command `etude profile`."""

from pathlib import Path
from typing import Annotated

import typer


def profile(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="lenet5/baseline, or the path of a YAML or JSON file.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as training.batch_size=8."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps to profile; some more are trained.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder to write to [default: profiles/EXPERIMENT/TIME].")] = None,
) -> None:
    """Show where the time of a training step goes, and which settings would make it faster."""
    from etude.callbacks.profiler import FILES
    from etude.experiment import profile_experiment

    found, folder = profile_experiment(
        experiment, overrides or [], steps=steps, out=out, say=lambda line: print(line, flush=True)
    )
    print(
        f"{found}\n\nmade {', '.join(str(folder / name) for name in FILES)}; open the trace at https://ui.perfetto.dev"
    )
