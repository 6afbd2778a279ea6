"""One server for all tests here: it forks the processes of every run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed_runs import Runs, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def runs(server: Server, tmp_path: Path) -> Runs:
    return Runs(server, tmp_path)
