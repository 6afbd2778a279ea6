"""A dashboard in this process, one in a process of its own, and one in a browser."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_runs import make_all
from starlette.testclient import TestClient

from etude.dashboard.server import make_app


@pytest.fixture
def client(tmp_path):
    """Return a client of a dashboard of `tmp_path`."""
    with TestClient(make_app(tmp_path), base_url="http://localhost:8484") as client:
        yield client


class Served:
    """A dashboard in a process of its own, asked through plain sockets."""

    def __init__(self, root, *options):
        command = [sys.executable, "-m", "etude", "dashboard", str(root), "--no-open", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline()
        found = re.search(r"http://(.*):(\d+)/(?:\?token=(\S+))?", self.line)
        assert found, self.line + self.process.stderr.read()
        self.port, self.token = int(found[2]), found[3]

    def connect(self):
        """Return an open connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, path, host=None, method="GET", body=b"", **headers):
        """Send a request exactly as given; return status and the whole answer."""
        head = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", "Connection: close"]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head += [f"Content-Length: {len(body)}"] * bool(body)
        with self.connect() as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode("latin-1") + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return int(answer.split(b" ", 2)[1]), answer.decode("latin-1")

    def end(self, number=signal.SIGINT):
        """Send a signal; return exit code and what was printed as an error."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors


@pytest.fixture
def serve():
    """Return a function that starts a dashboard in a process of its own."""
    started = []

    def start(root, *options):
        started.append(Served(root, *options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_all(folder)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Any]:
    from page_browser import Server

    one = Server(root)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from page_browser import CHROMIUM, api

    with api.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose errors, and messages of errors in the console, fail the test."""
    context = browser.new_context(
        viewport={"width": 1400, "height": 900}, accept_downloads=True, color_scheme="light"
    )
    one = context.new_page()
    one.set_default_timeout(20_000)
    problems: list[str] = []
    one.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.problems = problems
    yield one
    context.close()
    assert problems == []
