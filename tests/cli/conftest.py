"""Calls the command line in this process, and makes small experiments for it."""

import contextlib
import io
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from etude.cli.main import main

COMPONENTS = Path(__file__).with_name("cli_components.py")


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return self.err.splitlines()

    @property
    def error(self) -> str:
        """The one line on stderr; it is the whole complaint, in the form that all complaints have."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert len(self.errors) == 1, self.err
        line = self.errors[0]
        assert line.startswith("etude: "), line
        assert len(line) <= 300, f"{len(line)} characters: {line}"
        assert "Traceback" not in line
        return line


@pytest.fixture
def etude(monkeypatch, tmp_path):
    """Run `etude ARGUMENTS` in an empty folder and return exit code, stdout and stderr."""
    logger = logging.getLogger("etude")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ETUDE_DATA_DIR", raising=False)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["etude", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            else:
                code = 0
        return Outcome(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def config(tmp_path):
    """Write an experiment that trains in a moment, with sections replaced or added, and return its path."""

    def write(file: str = "toy.yaml", **sections: object) -> Path:
        data = {
            "imports": [str(COMPONENTS)],
            "model": {"name": "cli_net"},
            "data": {"name": "cli_points"},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "training": {"epochs": 2, "batch_size": 8, "device": "cpu"},
            **sections,
        }
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write


@pytest.fixture
def run(etude, config, tmp_path):
    """A finished run of the small experiment."""
    folder = tmp_path / "run"
    outcome = etude("train", config(), "--run-dir", folder, "-q")
    assert outcome.code == 0, outcome.err
    return folder
