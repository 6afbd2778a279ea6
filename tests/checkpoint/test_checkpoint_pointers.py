"""`last` and `best`: whatever copying a run has made of them, saving replaces them and no checkpoint is lost."""

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from etude.checkpoint import CheckpointManager, find_checkpoints, locate_checkpoint, read_checkpoint
from etude.core import CheckpointError

FORMS: dict[str, Callable[[Path], None]] = {
    "link": lambda path: None,
    "folder": lambda path: _become(path, lambda target: shutil.copytree(target, path)),
    "damaged folder": lambda path: _become(path, lambda target: _damaged(shutil.copytree(target, path))),
    "broken link": lambda path: _become(path, lambda target: path.symlink_to("nowhere")),
    "text file": lambda path: _become(path, lambda target: path.write_text(target.name)),
    "other text": lambda path: _become(path, lambda target: path.write_text("a note, and longer than a name")),
    "empty file": lambda path: _become(path, lambda target: path.touch()),
    "missing": lambda path: path.unlink(),
    "somebody's folder": lambda path: _become(path, lambda target: (path / "mine").mkdir(parents=True)),
}


def _become(path: Path, make: Callable[[Path], object]) -> None:
    target = path.resolve()
    path.unlink()
    make(target)


def _damaged(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def save(root: Path, step: int, value: float | None = None, keep_best: int = 1) -> None:
    metrics = {} if value is None else {"val_loss": value}
    weights = {"w": torch.full((2,), float(step))}
    CheckpointManager(root, keep_best=keep_best).save(
        step, model_state=weights, state={"step": step}, metrics=metrics
    )


def step_of(path: Path) -> int:
    return int(read_checkpoint(path).state["step"])


@pytest.mark.parametrize(("last", "best"), list(product(FORMS, FORMS)))
def test_whatever_they_are_they_are_replaced_and_nothing_is_lost(tmp_path: Path, last: str, best: str) -> None:
    root = tmp_path / "checkpoints"
    save(root, 1, 0.1)
    save(root, 2, 0.2)
    FORMS[last](root / "last")
    FORMS[best](root / "best")
    manager = CheckpointManager(root, keep_best=1)
    assert (manager.load().state, manager.load("best").state) == ({"step": 2}, {"step": 1})
    if "damaged" not in last and "somebody" not in last:
        assert step_of(locate_checkpoint(root / "last")) == 2
    save(root, 3, 0.3)
    assert (step_of(root / "last"), step_of(root / "best")) == (3, 1)
    assert [(root / name).is_symlink() for name in ("last", "best")] == [True, True]
    assert sorted(find_checkpoints(root)) == [1, 3]
    assert [path.name for path in root.rglob("mine")] == ["mine"] * (last, best).count("somebody's folder")


def test_an_intact_copy_of_a_damaged_original_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 4, 0.5)
    FORMS["folder"](tmp_path / "last")
    _damaged(tmp_path / "step-00000004")
    save(tmp_path, 5, 0.4)
    (kept,) = tmp_path.glob("copy-of-last-*")
    assert (step_of(kept), step_of(tmp_path / "last")) == (4, 5)


def test_a_copy_of_another_checkpoint_of_that_step_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "other", 4, 0.9)
    save(tmp_path / "run", 4, 0.5)
    (tmp_path / "run" / "last").unlink()
    shutil.copytree(tmp_path / "other" / "last", tmp_path / "run" / "last")
    save(tmp_path / "run", 5, 0.4)
    (kept,) = (tmp_path / "run").glob("copy-of-last-*")
    assert step_of(kept) == 4


@pytest.mark.parametrize("follow_links", [True, False])
def test_a_copied_folder_goes_on(tmp_path: Path, follow_links: bool) -> None:
    for step in (1, 2):
        save(tmp_path / "run", step, 0.1 * step, keep_best=2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=not follow_links)
    for root in (tmp_path / "run", tmp_path / "copy"):
        save(root, 3, 0.3, keep_best=2)
    names = [sorted(path.name for path in root.iterdir()) for root in (tmp_path / "run", tmp_path / "copy")]
    assert names[0] == names[1] == ["best", "last", "step-00000001", "step-00000002", "step-00000003"]


def test_without_links_a_text_file_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(22, "no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    for step in (1, 2, 3):
        save(tmp_path, step, 0.1 * step)
        assert (tmp_path / "last").read_text().strip() == f"step-{step:08d}"
        assert (tmp_path / "best").read_text().strip() == "step-00000001"
        assert (step_of(tmp_path / "last"), step_of(tmp_path / "best")) == (step, 1)
        assert step_of(locate_checkpoint(tmp_path / "best")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last", "step-00000001", "step-00000003"]


@pytest.mark.parametrize("text", ["../elsewhere", "/etc", "step-1/..", "a\0b", ".", ""])
def test_a_text_file_leads_nowhere_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "last").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "last")
