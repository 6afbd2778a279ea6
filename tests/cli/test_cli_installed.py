"""Installed from its wheel, without the repository, the command does what it does in a checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


def finished(*command, cwd, **more):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy of it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "experiments"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    finished(sys.executable, "-c", BUILD, cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs `etude` in an environment that has the wheel, and of this one only what Etude depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Paths in a .pth file are searched for modules, but not for further .pth files, such as an editable install's.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments, cwd):
        return finished(python, "-m", "etude", *arguments, cwd=cwd, env=environment)

    return run


def test_the_wheel_has_the_experiments_and_nothing_of_the_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "etude/experiments/lenet5/configs/lecun1998.yaml" in names
    assert "etude/experiments/code_multitask/components.py" in names
    assert "etude/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"etude"}
    assert not [name for name in names if "test_" in name or "/tests/" in name or "conftest" in name]
    assert "etude/dashboard/static/index.html" in names
    others = [name for name in names if not name.startswith("etude/dashboard/static/")]
    assert not [name for name in others if name.endswith((".pyc", ".svg"))]


def test_links_of_the_description_lead_somewhere_outside_the_repository_too(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    facts = message_from_bytes(archive.read(metadata))
    assert facts["Description-Content-Type"] == "text/markdown"
    description = facts.get_payload()
    assert description.lstrip().startswith("# Etude\n")
    assert "The loop and the step are two files" in description
    assert [link for link in re.findall(r"\]\(([^)]*)\)", description) if not link.startswith("http")] == []


def test_experiments_are_listed_in_an_empty_folder(installed, tmp_path):
    listed = installed("list", cwd=tmp_path)
    assert "lenet5/lecun1998" in listed
    assert "code_multitask/small" in listed


def test_an_experiment_trains_in_an_empty_folder(installed, tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (64, 1, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "digits.npz", images=images, labels=np.arange(64) % 10)
    data = ("data.name=arrays", "data.path=digits.npz")
    plan = ("training.epochs=1", "training.batch_size=16", "training.device=cpu")
    printed = installed("train", "lenet5/lecun1998", *data, *plan, "--run-dir", "run", cwd=tmp_path)
    assert "finished" in printed
    assert (tmp_path / "run" / "result.json").is_file()
    installed("evaluate", "run", cwd=tmp_path)


def test_a_new_experiment_is_written_and_checked(installed, tmp_path):
    installed("new", "mine", cwd=tmp_path)
    assert "mine/baseline" in installed("list", cwd=tmp_path)
    assert (tmp_path / "experiments" / "mine").is_dir()
