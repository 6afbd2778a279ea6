"""The options `--nproc`, `--nnodes` … of commands that several processes can run. Imports torch only to launch them."""

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from etude.cli.process import complain, ignore_signals
from etude.launched import is_launched

Nproc = Annotated[
    str | None, typer.Option("--nproc", metavar="N|auto", help="Processes on this machine; auto: one for each GPU.")
]
Nnodes = Annotated[
    str | None, typer.Option("--nnodes", metavar="N|MIN:MAX", help="Machines that run this command together.")
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", help="0 on the machine of --rdzv-endpoint, if it cannot tell by itself.")
]
Endpoint = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines find each other.")
]
MaxRestarts = Annotated[
    int | None, typer.Option("--max-restarts", help="Restarts after processes were lost [default: 0].")
]
OPTIONS = {
    "nproc": Nproc,
    "nnodes": Nnodes,
    "node_rank": NodeRank,
    "rdzv_endpoint": Endpoint,
    "max_restarts": MaxRestarts,
}
ARGUMENTS = "etude.arguments"
"""Where the context of the command line keeps its arguments."""


def launchable(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command: with them it runs in several processes, which it starts."""

    @wraps(command)
    def launched(context: typer.Context, **arguments: Any) -> None:
        options = {name: arguments.pop(name) for name in OPTIONS}
        if arguments.get("dry_run"):
            arguments["world"] = _world(options, arguments["world"])
        elif any(one is not None for one in options.values()):
            _launch(options, context.meta[ARGUMENTS])
        command(**arguments)

    own, by_name = inspect.signature(command), inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, by_name, default=None, annotation=kind) for name, kind in OPTIONS.items()]
    context = inspect.Parameter("context", by_name, annotation=typer.Context)
    parameters = [context, *(one.replace(kind=by_name) for one in own.parameters.values()), *more]
    launched.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    launched.__annotations__ = {"context": typer.Context, **command.__annotations__, **OPTIONS}
    return launched


def _world(options: dict[str, Any], world: int | None) -> int:
    """Return how many processes the options of a dry run start on all machines, or `--world`."""
    from etude.distributed.launch_options import LaunchOptions

    asked = LaunchOptions(**options)
    if world is None:
        return asked.processes * asked.nodes[1]
    if asked.nproc is not None or asked.nnodes is not None:
        raise typer.BadParameter(
            "it is the number of all processes; leave out --nproc and --nnodes", param_hint="--world"
        )
    return world


def _launch(options: dict[str, Any], arguments: list[str]) -> None:
    """Start the processes and exit with their code; return in one of them, or if there is to be only this one."""
    if is_launched():
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch reads it
    from etude.core.errors import ConfigError
    from etude.distributed.launch import launch
    from etude.distributed.launch_options import LaunchOptions
    from etude.distributed.network import JOIN_TIMEOUT_S

    if "RANK" in os.environ:
        raise ConfigError(
            "this process was started by another launcher (RANK is set); leave out --nproc and --nnodes"
        )
    asked = LaunchOptions(**options)
    if not asked.is_one_process:
        waits = f"; waiting for all of them, up to {JOIN_TIMEOUT_S} s" if asked.nodes[0] > 1 else ""
        print(f"starting {asked}{waits}", flush=True)
        code = launch(arguments, asked, complain)
        ignore_signals()
        raise SystemExit(code)
