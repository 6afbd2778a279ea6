"""The `etude` command: parses arguments, calls the library, prints the results. Imports torch only when needed."""

import gc
import importlib
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli.dashboard import dashboard
from etude.cli.data import data_app, tokenize
from etude.cli.find_lr import find_lr
from etude.cli.launch import ARGUMENTS, launchable
from etude.cli.process import (
    WarningLines,
    errors_in_words,
    ignore_signals,
    is_main,
    signals_stop,
    watched_output,
)
from etude.cli.profile import profile
from etude.cli.runs import report, runs_app
from etude.cli.schedule import schedule_app
from etude.cli.sweep import sweep_app
from etude.launched import accept_interrupts, end_with_launcher
from etude.lazy import import_room

ROOM_COMMANDS = {"compare": "etude.multitask.compare.command"}
"""Command → module of an optional package with a function of that name, which calls `context.obj()` for a runner."""


class Commands(TyperGroup):
    """The commands, with errors as messages; inside typer, which would swallow Ctrl-C without a message.

    Commands of optional packages are imported when they are run or listed.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, None if there is none."""
        if cmd_name not in self.commands:
            self._add_rooms()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self._add_rooms()
        return super().list_commands(ctx)

    def _add_rooms(self) -> None:
        for name, module in ROOM_COMMANDS.items():
            if name not in self.commands and (room := import_room(module)) is not None:
                single = typer.Typer(rich_markup_mode=None, add_completion=False)
                single.command(name)(getattr(room, name))
                self.commands[name] = typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments for processes that run the same command."""
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        with errors_in_words():
            return super().invoke(ctx)


def _load(name: str, module: str = "etude.experiment") -> Any:
    """Return a name of a module that imports torch, with those objects exempt from garbage collection.

    Collecting them is most of the time that an exit takes. If torch is already imported, nothing is exempted.
    """
    alone = "torch" not in sys.modules and gc.isenabled()
    if alone:
        gc.disable()
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        if alone:
            gc.freeze()
            gc.enable()
        accept_interrupts()


app = typer.Typer(
    name="etude",
    cls=Commands,
    help="Train PyTorch models from a config file: exact, fast and clear.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"obj": lambda: _load("ExperimentRunner")()},
)
config_app = typer.Typer(help="Show, check and describe experiment configs.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(runs_app, name="runs")
app.add_typer(schedule_app, name="schedule")
app.add_typer(sweep_app, name="sweep")

Experiment = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="lenet5/baseline, or the path of a YAML or JSON file.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Overrides, such as training.epochs=3.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder made by `etude train`.")]
Weights = Annotated[str, typer.Option("--weights", "--checkpoint", help="best, last or a step number.")]
ImportClass = Annotated[
    bool, typer.Option("--import-class", help="For a run made in Python: import and run the code that it names.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No live display.")]


@app.command()
@launchable
def train(
    experiment: Experiment,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder [default: runs/EXPERIMENT/TIME].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove an existing run in the run folder.")] = False,
    quiet: Quiet = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check it and say what it needs.")] = False,
    world: Annotated[int | None, typer.Option(help="With --dry-run: processes, here or not.")] = None,
) -> None:
    """Train an experiment in a new run folder."""
    if world is not None and not dry_run:
        raise typer.BadParameter("it is for --dry-run; --nproc starts processes", param_hint="--world")
    if dry_run:
        config = _load("load_experiment_config")(experiment, overrides=overrides or [])
        found = _load("dry_run", "etude.experiment.dry_run")(config, 1 if world is None else world)
        print("\n".join(found.lines()))
        return
    outcome = _load("train_experiment")(
        experiment, overrides or [], run_dir=run_dir, overwrite=overwrite, progress=not quiet
    )
    _conclude(outcome)


@app.command()
@launchable
def resume(
    run_dir: RunDir, overrides: Overrides = None, quiet: Quiet = False, import_class: ImportClass = False
) -> None:
    """Continue a run from its newest intact checkpoint."""
    _conclude(_load("resume_run")(run_dir, overrides or [], progress=not quiet, import_class=import_class))


@app.command()
@launchable
def evaluate(
    run_dir: RunDir,
    overrides: Overrides = None,
    split: Annotated[
        str | None,
        typer.Option(help="test, validation or train [default: test, or validation of a run made in Python]."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Instead of a split: a file or folder like the training's.")
    ] = None,
    checkpoint: Weights = "best",
    import_class: ImportClass = False,
) -> None:
    """Evaluate a checkpoint of a run on a split of its data, or on another file."""
    options = {"split": split, "which": checkpoint, "data": data, "import_class": import_class}
    found = _load("evaluate_run")(run_dir, overrides=overrides or [], **options)
    if is_main():
        print(f"{found.path} on the {found.split} split:" if data is None else f"{found.path} on {data}:")
        _print_metrics(found.metrics)
        for file in found.files:
            print(f"made {file}")


@app.command()
@launchable
def predict(
    run_dir: RunDir,
    data: Annotated[Path, typer.Option(help="A file or folder like the training's; labels are not needed.")],
    out: Annotated[Path, typer.Option(help="The file to write: .csv, .jsonl, .npy or .npz.")],
    overrides: Overrides = None,
    checkpoint: Weights = "best",
) -> None:
    """Predict the samples of a file with a run: classes and probabilities, or numbers."""
    found = _load("predict_run")(run_dir, data, out=out, which=checkpoint, overrides=overrides or [])
    if is_main():
        print(f"{out}: {len(found):,} prediction{'s' * (len(found) != 1)}, {found}")


@app.command()
def export(
    run_dir: RunDir,
    to: Annotated[str, typer.Option(help="state_dict, hub, torch or onnx.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to [default: RUN_DIR/export/FORMAT].")] = None,
    checkpoint: Weights = "best",
    import_class: Annotated[
        bool, typer.Option("--import-class", help="For a run made in Python: import the module of its model.")
    ] = False,
) -> None:
    """Export a run: plain weights, files for the Hugging Face Hub, torch.export or ONNX."""
    done = _load("export_run", "etude.export")(
        run_dir, to, out=out, which=checkpoint, overrides=overrides or [], import_class=import_class
    )
    print("\n".join(done.words))


@app.command("list")
def list_experiments() -> None:
    """List the available experiments and components."""
    from etude.config import kinds, list_experiments as found, names

    print("experiments")
    for name, path in found():
        print(f"  {name:<28} {path}")
    for kind in kinds():
        print(f"{kind}: {', '.join(names(kind))}")


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the experiment and of its new folder.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DATA",
            help="A .csv, .parquet, .jsonl or .npz file, or a folder of images, to train on.",
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --from: the column to predict, if not the last.")] = None,
    root: Annotated[Path, typer.Option(help="Folder of the experiments.")] = Path("experiments"),
) -> None:
    """Create a new experiment from the template, or a config for existing data."""
    if target is not None and data is None:
        raise typer.BadParameter(
            "it names a column of the data; pass the data too, with --from", param_hint="--target"
        )
    if data is None:
        folder = _load("new_experiment")(name, root)
    else:
        folder, words = _load("new_experiment_from")(name, data, root, target)
        print("\n".join(words))
    print(f"made {folder}; train it with: etude train {name}/baseline")


@app.command()
def eject(
    source: Annotated[str, typer.Argument(metavar="RUN_OR_EXPERIMENT", help="A run folder, or an experiment.")],
    out: Annotated[Path, typer.Argument(metavar="FILE.py", help="The file to write.")],
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write an experiment as one file of plain PyTorch that trains to the same weights."""
    files = _load("eject", "etude.eject")(source, out, overrides or [], overwrite=overwrite)
    print(f"made {' and '.join(map(str, files))}; train it with: python {out}")


app.command("find-lr")(find_lr)
app.command()(profile)
app.command()(report)
app.command()(tokenize)
app.command()(dashboard)


@config_app.command("show")
def config_show(experiment: Experiment, overrides: Overrides = None) -> None:
    """Print the complete resolved config, defaults included, as YAML."""
    print(_load("load_experiment_config")(experiment, overrides=overrides or []).to_yaml(), end="")


@config_app.command("check")
def config_check(experiment: Experiment, overrides: Overrides = None) -> None:
    """Check a config without loading its data; every mistake is one line."""
    config = _load("load_experiment_config")(experiment, overrides=overrides or [])
    _load("check_experiment")(config)
    print(f"{config.path}: fine")


@config_app.command("schema")
def config_schema(
    imports: Annotated[list[str] | None, typer.Option("--import", help="Modules that register components.")] = None,
) -> None:
    """Print the JSON Schema of experiment files.

    Editors use it to complete and check YAML.
    """
    import json

    print(json.dumps(_load("experiment_schema")(imports or []), indent=2))


def _conclude(outcome: Any) -> None:
    ignore_signals()
    if not outcome.is_main:
        raise SystemExit(130 if outcome.status == "interrupted" else 0)
    if outcome.status == "interrupted":
        # Print at once: a launcher that sees another process exit may end this one too.
        print(f"stopped at step {outcome.step} and saved; continue with: {outcome.resume_command}", flush=True)
        raise SystemExit(130)
    why = f" ({outcome.reason})" if outcome.reason else ""
    print(f"finished at step {outcome.step}{why}; run folder {outcome.run_dir}")
    validation = {name: value for name, value in outcome.metrics.items() if name.startswith("val_")}
    speed = {name: outcome.metrics[name] for name in ("tokens_per_s", "mfu", "data_wait") if name in outcome.metrics}
    _print_metrics(validation | speed if validation else outcome.metrics)
    if outcome.best is not None and outcome.best.best is not None:
        from etude.callbacks.progress_lines import judged

        print(judged(outcome.best))
    if outcome.samples:
        print(f"sampled from the model:\n{outcome.samples}", end="")


def _print_metrics(metrics: dict[str, float]) -> None:
    is_language = any(name.endswith("perplexity") for name in metrics)
    width = max(16, *map(len, metrics)) if metrics else 16
    for name, value in metrics.items():
        of_classes = name.endswith("accuracy") and not is_language
        percent = f"   ({100 - 100 * value:.2f} % error)" if of_classes else ""
        shown = f"{value:.2%}" if name in ("mfu", "data_wait") else f"{value:.6g}"
        print(f"  {name:<{width}} {shown}{percent}")


def main() -> None:
    """Run the command line."""
    end_with_launcher()
    logger = logging.getLogger("etude")
    if not any(isinstance(handler, (WarningLines, logging.NullHandler)) for handler in logger.handlers):
        logger.addHandler(WarningLines(logging.WARNING) if is_main() else logging.NullHandler())
    with watched_output(), signals_stop():
        app()


if __name__ == "__main__":
    main()
