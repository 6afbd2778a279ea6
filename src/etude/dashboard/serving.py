"""Start the dashboard's server: find a free port, print its address, end with Ctrl-C."""

import contextlib
import errno
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn

from etude.core.errors import ConfigError
from etude.dashboard.security import is_local, new_token
from etude.dashboard.server import make_app

PORT = 8484
_TRIES = 20
_EVERYWHERE = ("0.0.0.0", "::")


def serve(
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    open_page: bool = True,
    webhook: str | None = None,
    needs_token: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the runs below a folder until Ctrl-C; raise ConfigError if that is not possible."""
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; pass the folder that holds your runs")
    token = new_token() if needs_token or not is_local(host) else None
    with contextlib.closing(bind(host, port)) as listener:
        shown = socket.gethostname() if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
        say(f"dashboard of {root}: {address} (Ctrl-C ends it)")
        app = make_app(root, host=host, token=token, webhook=webhook)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                http="h11",
                ws="none",
                h11_max_incomplete_event_size=1 << 18,  # the names of some hundred runs
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )
        app.state.dashboard.is_over = lambda: server.should_exit  # else an open page would keep the server alive
        if open_page:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port it is the first free one from 8484 on."""
    wanted = [port] if port is not None else [*range(PORT, PORT + _TRIES), 0]
    problem: OSError | None = None
    for one in wanted:
        try:
            return _listening(host, one)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    assert problem is not None
    if problem.errno == errno.EADDRINUSE:
        raise ConfigError(f"port {port} of {host} is in use; choose another --port, or leave it out") from None
    raise ConfigError(f"cannot listen on {host}, port {port or PORT}: {problem.strerror or problem}") from None


def _listening(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=128)
    # asyncio sends small answers at once only where the protocol is given: else they wait 40 ms
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, listener.detach())
