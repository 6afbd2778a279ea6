"""The commands about runs: `etude runs list`, `compare`, `tail` and `plot`."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from etude.monitor.series import Series

runs_app = typer.Typer(help="List, compare, follow and plot runs.", no_args_is_help=True)

_RUN = "A path, a name below the folder of the runs, its beginning, or latest."
Root = Annotated[Path, typer.Option("--dir", help="Folder of the runs, for names.")]


@runs_app.command("list")
def list_runs(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the runs.")] = Path("runs"),
    sort: Annotated[
        str, typer.Option(help="run, state, progress, best, last, duration, age, a metric or a config key.")
    ] = "age",
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="Sort the other way round.")] = False,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", "-f", help="A text of the name, key=value, key!=value or key<number; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all runs as JSON, with their config.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show all runs and all differing keys.")] = False,
) -> None:
    """List the runs below a folder: state, progress, best and last value, and the settings that differ."""
    from etude.runs import listing, tables

    found = listing.list_runs(root, filters or [], sort, reverse)
    if as_json:
        print(json.dumps([run.plain() | {"config": run.config} for run in found], indent=2, default=str))
        return
    if not found:
        print(f"no runs in {root}" + (" fit the filters" if filters else ""))
        return
    keys, shown = listing.differing(found), found if everything else found[: tables.MOST_RUNS]
    some = keys if everything else keys[: tables.MOST_KEYS]
    make_console().print(tables.run_table(shown, some))
    left_out = [(len(found) - len(shown), "run"), (len(keys) - len(some), "differing key")]
    if words := [f"{count:,} more {noun}{'s' * (count > 1)}" for count, noun in left_out if count]:
        print(f"{' and '.join(words)}: --all shows them")


@runs_app.command("compare")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help=_RUN)],
    metric: Annotated[str | None, typer.Option(help="Metric of the curves [default: the monitored one].")] = None,
    root: Root = Path("runs"),
) -> None:
    """Compare runs: what differs in config and environment, their metrics and curves."""
    from etude.core.spelling import printable
    from etude.runs import tables
    from etude.runs.comparison import compare_runs
    from etude.runs.find import find_run

    found = compare_runs([find_run(run, root) for run in runs])
    console = make_console()
    for title, table in tables.comparison_tables(found):
        if title:
            console.print(f"\n{title}", style="bold")
        console.print(table)
    name = metric or found.monitor
    drawn = found.curves(name)
    if metric is not None and not drawn:
        found.runs[0].series(metric)  # raises, with the nearest names
    if drawn:
        console.print(f"\n{printable(name)}", style="bold")
        show_curves(console, [curve for _, curve in drawn], [run for run, _ in drawn], x="step")


@runs_app.command("tail")
def tail(
    run: Annotated[str, typer.Argument(metavar="RUN", help=_RUN)] = "latest",
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Earlier lines to show; 0 shows all.")] = 20,
    root: Root = Path("runs"),
) -> None:
    """Follow a run until it ends: log points, epochs and events. The exit code is 1 if it failed or was lost."""
    from etude.runs.find import find_run
    from etude.runs.tail import follow

    line = ""
    try:
        for line in follow(find_run(run, root), lines):
            print(line, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if line.startswith(("failed", "lost")):
        raise SystemExit(1)


@runs_app.command("plot")
def plot(
    words: Annotated[list[str], typer.Argument(metavar="RUN… METRIC", help=_RUN)],
    x: Annotated[str, typer.Option("--x", help="step, time, epoch, samples or tokens.")] = "step",
    log: Annotated[bool, typer.Option("--log", help="Logarithmic y axis.")] = False,
    smooth: Annotated[
        float, typer.Option(min=0.0, max=0.9999, help="Weight of an exponential average, such as 0.9.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="Write a .png, .svg or .pdf instead (extra plot: matplotlib).")
    ] = None,
    root: Root = Path("runs"),
) -> None:
    """Plot a metric of one or several runs, in the terminal or to a file."""
    from etude.core.spelling import printable
    from etude.monitor.series import RunMetrics
    from etude.runs.comparison import short_names
    from etude.runs.find import find_run

    paths, name = [find_run(word, root) for word in words[:-1] or ["latest"]], words[-1]
    curves, names = [RunMetrics(path).series(name, x) for path in paths], short_names(paths)
    if out is not None:
        from etude.runs.figures import save_figure

        save_figure(curves, names, out, x_label=_with_unit(x), log=log, smooth=smooth)
        print(f"made {out}")
        return
    console = make_console()
    console.print(printable(f"{name}  {names[0]}" if len(names) == 1 else name), style="bold")
    show_curves(console, curves, names, x, log, smooth)


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN_DIR…", help=_RUN)],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    root: Root = Path("runs"),
) -> None:
    """Write a report of runs: one HTML file with charts that opens anywhere, without a network."""
    from etude.runs.find import find_run
    from etude.runs.report import write_report

    size = write_report([find_run(run, root) for run in runs], out)
    print(f"made {out} ({size / 1e6:.1f} MB)")


def show_curves(
    console: "Console", curves: "list[Series]", names: list[str], x: str, log: bool = False, smooth: float = 0.0
) -> None:
    """Print curves that share their axes, with their names if there are several."""
    from etude.runs.curves import Style, draw, legend

    is_plain = len(curves) > 1 and console.color_system is None
    style: Style = "ascii" if not console.encoding.startswith("utf") else "letters" if is_plain else "braille"
    width = min(100, console.width)
    console.print(draw(curves, width, log=log, smooth=smooth, style=style, x_label=_with_unit(x)))
    if len(curves) > 1:
        console.print(legend(names, style))


def _with_unit(x: str) -> str:
    return "seconds" if x == "time" else x


def make_console() -> "Console":
    """Return a console for tables: as wide as the terminal, or as wide as needed in a pipe."""
    from rich.console import Console

    with suppress(AttributeError):  # a file in memory
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    width = None if sys.stdout.isatty() else 1000
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
