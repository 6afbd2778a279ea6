"""A writer that dies at any moment leaves an intact checkpoint, and nothing that the next one cannot clear away."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import read_filled

from etude.checkpoint import CheckpointManager, find_checkpoints, newest_intact
from etude.checkpoint.store import verify_checkpoint
from forked_python import run_python

OPERATIONS = ["open", "write", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir"]


class Death(BaseException):
    """The process is gone: nothing after this may touch the disk."""


class Mortal:
    """Lets `lives` operations on files through, and none after that, as if the process had been killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
        self.lives = lives
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self.guard(getattr(os, name)))
        monkeypatch.setattr(fcntl, "flock", self.guard(fcntl.flock))

    def guard(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.lives == 0:
                raise Death
            self.lives -= 1
            return function(*args, **kwargs)

        return call


def save(root: Path, step: int, number: int) -> None:
    model = {"weight": torch.full((8,), float(number)), "bias": torch.full((3,), float(number))}
    state = {"momentum": {"weight": torch.full((8,), float(number))}, "number": number}
    CheckpointManager(root, keep_best=0).save(step, model_state=model, state=state, metrics={"val_loss": number})


def test_death_at_every_single_operation(tmp_path: Path) -> None:
    lives, died = 0, True
    while died:
        root = tmp_path / f"died-after-{lives}"
        save(root, 1, 1)
        finished, died = 1, False
        with pytest.MonkeyPatch.context() as monkeypatch:
            Mortal(monkeypatch, lives)
            try:
                for step, number in ((1, 2), (2, 3)):  # a replacement, then a save that deletes an older one
                    save(root, step, number)
                    finished = number
            except Death:
                died = True
        path, warnings = newest_intact(root)
        assert finished <= read_filled(path) <= finished + 1
        assert warnings == []
        for other in find_checkpoints(root).values():
            verify_checkpoint(other)  # nothing half written or half deleted has a checkpoint's name
        save(root, 9, 9)
        assert sorted(p.name for p in root.iterdir()) == ["best", "last", "step-00000009"]
        assert read_filled(root / "last") == 9
        lives += 1
    assert lives > 60


def test_death_while_copied_folders_are_replaced(tmp_path: Path) -> None:
    """`last` and `best` are folders beside their originals."""
    for step in (1, 2):
        CheckpointManager(tmp_path / "run").save(
            step, model_state={}, state={"number": step}, metrics={"val_loss": step}
        )
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    lives, died = 0, True
    while died:
        root, died = tmp_path / f"died-after-{lives}", False
        shutil.copytree(tmp_path / "copy", root)
        with pytest.MonkeyPatch.context() as monkeypatch:
            Mortal(monkeypatch, lives)
            try:
                CheckpointManager(root).save(3, model_state={}, state={"number": 3}, metrics={"val_loss": 3})
            except Death:
                died = True
        manager = CheckpointManager(root)
        assert manager.load().state["number"] in ((2, 3) if died else (3,))
        assert manager.load("best").state == {"number": 1}
        manager.finish(3)
        assert {path.name for path in root.iterdir()} - {"step-00000003"} == {
            "best",
            "last",
            "step-00000001",
            "step-00000002",
        }
        assert CheckpointManager(root).load("step-00000002").state == {"number": 2}
        lives += 1
    assert lives > 40


def run_killer(root: Path, kills: int, seed: int, size: int) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("checkpoint_killer.py")
    done = run_python(script, root, kills, seed, size)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_kills(root: Path, kills: int, seed: int, size: int) -> None:
    root.mkdir()
    results = run_killer(root, kills, seed, size)
    assert len(results) == kills
    for result in results:
        assert result["killed"]
        assert result["warnings"] == []
        assert result["finished"] <= result["found"] <= result["finished"] + 1
    assert any(result["left"] for result in results), "no kill hit a save: the test proves nothing"


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    check_kills(tmp_path / "run", kills=12, seed=0, size=20_000)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "size"), [(1, 10), (2, 20_000), (3, 2_000_000)])
def test_kill_9_many_times(tmp_path: Path, seed: int, size: int) -> None:
    check_kills(tmp_path / "run", kills=60, seed=seed, size=size)
