"""A terminal for the tests of what is drawn."""

import pytest
from callback_terminal import Terminal


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "30")
    return Terminal()
