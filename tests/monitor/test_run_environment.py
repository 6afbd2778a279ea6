"""env.json: versions, device and the repository's commit, also without git and without a repository."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from etude.monitor import RunFolder, collect_environment


@pytest.fixture(autouse=True)
def git_may_look(monkeypatch):
    monkeypatch.delenv("GIT_DIR", raising=False)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_versions_threads_and_command():
    found = collect_environment(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["cpu_threads"] == torch.get_num_threads()
    assert found["device"]["type"] == "cpu"
    assert found["command"] == sys.argv
    assert os.uname().nodename not in json.dumps([value for key, value in found.items() if key != "command"]).split(
        '"'
    )


def test_commit_and_dirty_flag(tmp_path):
    assert collect_environment(folder=tmp_path)["git"] is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "runs").write_text("untracked files are no change")
    assert collect_environment(folder=tmp_path)["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "file").write_text("two")
    assert collect_environment(folder=tmp_path)["git"] == {"commit": commit, "dirty": True}


def test_changes_that_are_not_committed_are_kept(tmp_path, monkeypatch):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one\n")
    (tmp_path / "odd").write_bytes(b"\xff\n")
    (tmp_path / ".gitattributes").write_text("file diff=own\n")
    git(tmp_path, "config", "diff.own.command", "touch ran-a-program")
    git(tmp_path, "config", "diff.own.textconv", "touch ran-a-program")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    folder = RunFolder(tmp_path / "sub")
    folder.write_environment()
    assert not folder.diff_path.exists()
    (tmp_path / "file").write_text("two\n")
    (tmp_path / "odd").write_bytes(b"\xfe\n")
    folder.write_environment()
    diff = folder.diff_path.read_text()
    assert "-one\n+two\n" in diff
    assert not list(tmp_path.rglob("ran-a-program"))
    (tmp_path / "file").write_text("long\n" * 100_000)
    folder.write_environment()
    assert 200_000 < folder.diff_path.stat().st_size < 200_100
    assert "cut off" in folder.diff_path.read_text()[-100:]
    # one that cannot be written is no reason to fail
    folder.diff_path.unlink()
    folder.diff_path.mkdir()
    folder.write_environment()
    folder.diff_path.rmdir()
    git(tmp_path, "checkout", ".")
    folder.diff_path.write_text("old")
    folder.write_environment()
    assert not folder.diff_path.exists()


def test_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_environment()["git"] is None
