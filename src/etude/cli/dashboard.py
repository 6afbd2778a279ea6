"""The command `etude dashboard`. Imports no torch."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="A folder with runs, at any depth.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; elsewhere than here a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port [default: the first free one from 8484 on].")
    ] = None,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help="Where alerts are sent, as JSON.")] = None,
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token on this machine too, which others may use.")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in a browser.")] = False,
) -> None:
    """Show runs in a local web page, also while they train."""
    try:
        from etude.dashboard.serving import serve
    except ModuleNotFoundError as error:
        from etude.core.errors import ConfigError

        if error.name is None or error.name.startswith("etude"):
            raise
        raise ConfigError(f"the dashboard needs {error.name}: pip install 'etude[dashboard]'") from None
    say = partial(print, flush=True)
    open_page = not no_open
    serve(runs_dir, host=host, port=port, open_page=open_page, webhook=webhook, needs_token=token, say=say)
