"""The commands about sweeps: `etude sweep FILE`, `etude sweep status`, `best` and `plot`."""

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli.runs import make_console, show_curves


class SweepCommands(TyperGroup):
    """The commands; what is none of them is what `run` takes: `etude sweep FILE` is `etude sweep run FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` where no command is named."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


sweep_app = typer.Typer(
    cls=SweepCommands,
    help="Search for the best settings of an experiment: many runs, chosen by optuna (extra sweep).\n\n"
    "`etude sweep FILE` is short for `etude sweep run FILE`.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a sweep.")]
Storage = Annotated[
    str | None, typer.Option(metavar="URL", help="A database for optuna, instead of a file in the folder.")
]


@sweep_app.command("run")
def run(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="A sweep file, an experiment, or the folder of a sweep to continue.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUES",
            help="Values of a config key: 32,64 or 1e-4..1e-1:log or 0..1:0.25. One value is for all trials.",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of trials of the whole sweep [default: all of a grid].")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Trials at the same time [default: 1].")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes of a trial [default: 1].")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of a trial; their mean counts [default: 1].")] = None,
    metric: Annotated[str | None, typer.Option(help="What is compared [default: the monitored one].")] = None,
    mode: Annotated[str | None, typer.Option(help="min or max, where the name of the metric does not tell.")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="tpe, random, grid, cmaes or gp [default: tpe; grid for lists].")
    ] = None,
    pruner: Annotated[
        str | None,
        typer.Option(help="none, median, percentile, hyperband, successive_halving or threshold [default: none]."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the sweep [default: runs/sweeps/EXPERIMENT/TIME].")
    ] = None,
    storage: Storage = None,
) -> None:
    """Run a sweep, continue one, or help with one that runs."""
    from etude.sweep import run_sweep

    options = {"trials": trials, "workers": workers, "nproc": nproc, "seeds": seeds, "metric": metric, "mode": mode}
    options |= {"sampler": sampler, "pruner": pruner}
    say = partial(print, flush=True)
    outcome = run_sweep(source, words or [], run_dir=folder, storage=storage, options=options, say=say)
    if outcome.status == "interrupted":
        print(f"stopped; continue with: {outcome.command}", flush=True)
        raise SystemExit(130)
    from etude.sweep.table import rows_of, summary

    sweep, spec, study = _open(outcome.path, storage)
    print("\n".join(summary(rows_of(sweep, study, spec), spec, study)))
    if outcome.status == "waiting":
        print("other processes still run trials")


@sweep_app.command("status")
def status(
    folder: Folder,
    storage: Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trials as JSON.")] = False,
) -> None:
    """Show the trials of a sweep, also while it runs: state, value and settings, the best, and when it is done."""
    sweep, spec, study = _open(folder, storage)
    from etude.sweep.table import rows_of, status_table, summary

    rows = rows_of(sweep, study, spec)
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    make_console().print(status_table(rows, spec))
    print("\n".join(summary(rows, spec, study)))


@sweep_app.command("best")
def best(
    folder: Folder,
    storage: Storage = None,
    out: Annotated[Path | None, typer.Option(help="Write the config to this file instead.")] = None,
) -> None:
    """Print the config of the best trial, which `etude train` takes."""
    sweep, spec, study = _open(folder, storage)
    from etude.sweep.best import best_config

    text = best_config(sweep, spec, study)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        from etude.core.errors import ConfigError

        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    processes = f" --nproc {spec.nproc}" if spec.nproc > 1 else ""
    print(f"made {out}; train it with: etude train {quote(str(out))}{processes}")


@sweep_app.command("plot")
def plot(
    folder: Folder,
    storage: Storage = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a .png, .svg or .pdf instead, with parallel coordinates (extra plot).")
    ] = None,
) -> None:
    """Plot a sweep: the history of its values, and which settings matter."""
    _, spec, study = _open(folder, storage)
    from etude.sweep.plot import bars, history, importance, save_pictures

    if out is not None:
        save_pictures(study, spec, out)
        print(f"made {out}")
        return
    curves, console = history(study, spec), make_console()
    console.print(f"{spec.metric} of the trials, and the best so far", style="bold")
    show_curves(console, curves, ["trial", "best so far"], "trial")
    if shares := importance(study):
        print("\n".join(["importance of settings", *bars(shares)]))


def _open(path: Path, storage: str | None) -> Any:
    from etude.sweep import SweepFolder

    folder = SweepFolder(path, storage)
    spec, study = folder.read(), folder.study()
    folder.check_study(study, spec)
    return folder, spec, study
