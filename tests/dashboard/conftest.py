"""A dashboard in this process, and one in a process of its own."""

import re
import signal
import socket
import subprocess
import sys

import pytest
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
