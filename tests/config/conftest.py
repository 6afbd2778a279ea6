"""An empty registry for each test, and files written in one line."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.config import registry

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in registry.kinds():  # once for all: a module imported during a test would register into its empty one
        for name in registry.names(kind):
            registry.lookup(kind, name)
    monkeypatch.setattr(registry, "_COMPONENTS", {})
    monkeypatch.setattr(registry, "MODULES", {})


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a file below the current folder, so that messages show its short name."""
    monkeypatch.chdir(tmp_path)

    def put(name: str, text: str) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return put
