"""`etude runs`: lists, comparisons, plots and following, in words for people and for programs."""

import json
import subprocess
import sys

import pytest

from made_runs import lines, make_run


@pytest.fixture
def two(tmp_path):
    """Two runs that differ in a rate and in torch's version."""
    make_run(tmp_path / "runs/toy/one")
    other = make_run(tmp_path / "runs/toy/two", [1.0, 0.4], config={"optimizer": {"name": "adamw", "lr": 0.5}})
    (other / "env.json").write_text('{"versions": {"torch": "2.12"}, "time": "x"}')
    return tmp_path / "runs"


def test_list(etude, two):
    outcome = etude("runs", "list")
    assert (outcome.code, outcome.err) == (0, "")
    title, *rows = outcome.out.splitlines()
    assert title.split("  ")[0] == "run"
    assert title.split()[-1] == "lr"
    assert {row.split()[0]: (row.split()[1], row.split()[-1]) for row in rows} == {
        "toy/one": ("finished", "0.1"),
        "toy/two": ("finished", "0.5"),
    }


def test_list_as_json_has_everything(etude, two):
    for place in range(50):
        make_run(two / f"more/{place}")
    found = json.loads(etude("runs", "list", "--json", "--sort", "run").out)
    assert len(found) == 52
    assert found[-1]["id"] == "toy/two"
    assert (found[-1]["best"]["value"], found[-1]["config"]["optimizer.lr"]) == (0.8, 0.5)
    short, whole = etude("runs", "list").out, etude("runs", "list", "--all").out
    assert (len(short.splitlines()), len(whole.splitlines())) == (42, 53)
    assert short.splitlines()[-1] == "12 more runs: --all shows them"


def test_list_of_nothing(etude, tmp_path):
    assert "no folder runs" in etude("runs", "list").error
    (tmp_path / "runs").mkdir()
    assert etude("runs", "list").out == "no runs in runs\n"
    make_run(tmp_path / "runs/a")
    assert etude("runs", "list", "-f", "state=failed").out == "no runs in runs fit the filters\n"


def test_compare_shows_only_differences(etude, two):
    outcome = etude("runs", "compare", "one", "two")
    assert outcome.code == 0
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["lr", "0.1", "0.5"] in rows
    assert ["torch", "2.11", "2.12"] in rows
    assert ["val_loss", "1.0000", "0.8000"] in rows
    assert not any(row[:1] in (["seed"], ["name"], ["time"]) for row in rows)
    assert [row[0] for row in rows if row[:1] and row[0] in ("optimizer", "versions", "training")] == [
        "optimizer",
        "versions",
    ]
    assert ["a", "one", "b", "two"] in rows
    assert "two runs" in etude("runs", "compare", "one").error
    assert "'val_loss'" in etude("runs", "compare", "one", "two", "--metric", "val_los").error


def test_plot_in_the_terminal(etude, two):
    outcome = etude("runs", "plot", "one", "loss", "--x", "samples", "--log")
    assert outcome.code == 0
    text = outcome.out.splitlines()
    assert text[0] == "loss  one"
    high, middle, low = [float(line.split()[0]) for line in text[1:] if "┤" in line]
    assert (high, low) == (1.0, 0.25)
    assert middle == pytest.approx(0.5, rel=0.1)
    assert text[-1].split() == ["8", "32", "samples"]
    assert "'loss'" in etude("runs", "plot", "one", "losss").error
    assert "axis 'stepp'" in etude("runs", "plot", "one", "loss", "--x", "stepp").error
    assert "there is no run 'three'" in etude("runs", "plot", "three", "loss").error


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_to_a_file(etude, two, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"curve.{suffix}"
    assert etude("runs", "plot", "one", "two", "loss", "--out", out, "--smooth", "0.5").code == 0
    assert out.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert "cannot write" in etude("runs", "plot", "one", "loss", "--out", tmp_path / "none" / out.name).error


def test_plot_to_a_file_without_matplotlib(etude, two, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "etude[plot]" in etude("runs", "plot", "one", "loss", "--out", "a.png").error
    assert ".png" in etude("runs", "plot", "one", "loss", "--out", "a.jpg").error


def test_tail_says_how_a_run_ended(etude, two):
    assert etude("runs", "tail", "one").out.splitlines()[-1].startswith("finished after")
    make_run(two / "dead", [1.0], state="lost", beat_age_s=99)
    outcome = etude("runs", "tail", "dead")
    assert (outcome.code, outcome.out.splitlines()[-1].split()[0]) == (1, "lost")


def test_report(etude, two, tmp_path):
    outcome = etude("report", "one", "two", "--out", "both.html")
    assert (outcome.code, outcome.out) == (0, "made both.html (0.0 MB)\n")
    assert (tmp_path / "both.html").read_text().startswith("<!doctype html>")
    assert "there is no run 'three'" in etude("report", "three").error
    assert "choose another --out" in etude("report", "one", "--out", "nowhere/both.html").error


def test_names_of_others_do_not_reach_the_terminal(etude, two):
    evil = make_run(two / "evil", [1.0, 2.0], config={"name": "[red]\x1b[2J", "optimizer": {"lr": "\x1b]0;x\x07[b]"}})
    lines(evil / "metrics.jsonl", [{"split": "train", "step": 3, "time": 1e9, "[red]\x1b[2J": 1.0}])
    for command in (
        ["list", "--all"],
        ["compare", "one", "evil"],
        ["plot", "evil", "[red]\x1b[2J"],
        ["tail", "evil"],
    ):
        outcome = etude("runs", *command)
        assert outcome.code == 0, outcome.err
        assert "\x1b" not in outcome.out
        assert "\x07" not in outcome.out
    assert "[b]" in etude("runs", "list", "--all").out


def test_no_command_about_runs_imports_torch(two):
    code = """
import sys
from etude.cli.main import app
commands = [["list"], ["compare", "one", "two"], ["plot", "one", "loss"], ["tail", "one"]]
for words in (["report", "one"], *(["runs", *words] for words in commands)):
    try:
        app(words)
    except SystemExit as end:
        assert not end.code, words
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=two.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
