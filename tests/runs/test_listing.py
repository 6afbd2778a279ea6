"""The list of runs, what they differ in, and finding one by a word."""

import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from etude.core import ConfigError, RunFolderError
from etude.runs.find import find_run
from etude.runs.listing import differing, list_runs
from etude.runs.report.page import report
from etude.runs.tables import run_table
from made_runs import lines, make_run


@pytest.fixture
def root(tmp_path):
    """Four runs in four states."""
    now = time.time()
    make_run(tmp_path / "runs/a/20260101-1", [1.0, 0.5, 0.5, 0.4])
    other = {"optimizer": {"name": "adamw", "lr": 0.5}, "callbacks": [{"name": "ema", "decay": 0.9}]}
    make_run(tmp_path / "runs/a/20260102-1", [1.0, 0.9], state="running", config=other)
    make_run(tmp_path / "runs/b/20260101-2", [None, None], state="lost", beat_age_s=60, started=now - 500)
    make_run(tmp_path / "runs/b/20260103-1", [], state="failed", started=now - 900, beat_age_s=900)
    return tmp_path / "runs"


def ids(runs):
    return [run.id for run in runs]


def test_states_and_progress(root):
    found = {run.id: run for run in list_runs(root)}
    states = {name: run.status.state for name, run in found.items()}
    assert states == {
        "a/20260101-1": "finished",
        "a/20260102-1": "running",
        "b/20260101-2": "lost",
        "b/20260103-1": "failed",
    }
    assert found["a/20260101-1"].facts["best"] == 0.8
    assert (found["b/20260101-2"].facts["best"], found["b/20260103-1"].facts["last"]) == (None, None)
    assert ids(list_runs(root))[-1] == "b/20260103-1"  # the oldest


def test_only_what_differs(root):
    runs = list_runs(root)
    assert differing(runs) == ["optimizer.lr", "callbacks.ema.decay"]
    assert differing([run for run in runs if run.id.startswith("b")]) == []


def test_filters_are_all_needed(root):
    assert ids(list_runs(root, ["state=running"])) == ["a/20260102-1"]
    assert ids(list_runs(root, ["a/", "lr=0.1"])) == ["a/20260101-1"]
    assert ids(list_runs(root, ["loss<0.6", "state!=running"])) == ["a/20260101-1"]
    assert list_runs(root, ["state=nothing"]) == []
    with pytest.raises(ConfigError, match=r"optimizer\.lr|'lr'"):
        list_runs(root, ["lrr=1"])


def test_orders(root):
    assert ids(list_runs(root, sort="best"))[:2] == ["a/20260101-1", "a/20260102-1"]
    assert ids(list_runs(root, sort="best", reverse=True))[:2] == ["a/20260102-1", "a/20260101-1"]
    assert ids(list_runs(root, sort="lr"))[-1] == "a/20260102-1"
    assert ids(list_runs(root, sort="run")) == sorted(ids(list_runs(root)))
    with pytest.raises(ConfigError, match="'duration'"):
        list_runs(root, sort="duratoin")


def test_better_is_first_whatever_better_means(tmp_path):
    for name, losses in (("one", [0.1, 0.1]), ("two", [0.3, 0.3])):
        folder = make_run(tmp_path / name, losses)
        for file in ("events.jsonl", "status.json", "result.json"):
            (folder / file).write_text((folder / file).read_text().replace('"min"', '"max"'))
    assert ids(list_runs(tmp_path, sort="best")) == ["two", "one"]


def test_a_folder_without_runs(tmp_path):
    assert list_runs(tmp_path) == []
    with pytest.raises(RunFolderError, match="nowhere"):
        list_runs(tmp_path / "nowhere")


def test_a_run_by_its_path_name_beginning_or_age(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    expected = root / "a/20260101-1"
    for word in ("runs/a/20260101-1", "a/20260101-1", "20260101-1", "a/20260101", f"{expected}", "a/20260101-1/"):
        assert os.path.realpath(find_run(word)) == str(expected)
    os.utime(root / "a/20260102-1/config.yaml", (2e9, 2e9))
    os.utime(root / "b/20260101-2/config.yaml", (1.9e9, 1.9e9))
    assert find_run("latest").name == "20260102-1"
    assert find_run("b/latest").name == find_run("runs/b/latest").name == "20260101-2"


@pytest.mark.parametrize(
    ("word", "says"),
    [("20260101", "2 runs"), ("runs", "4 runs"), ("20260109-1", "2026010"), ("", "no run"), ("zzz", "runs list")],
)
def test_a_word_that_means_no_run_or_several(root, monkeypatch, word, says):
    monkeypatch.chdir(root.parent)
    with pytest.raises(RunFolderError, match=says):
        find_run(word)


@given(st.data())
def test_a_damaged_folder_does_not_hide_the_others(data):
    anything = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({})
    )
    keys = st.sampled_from(
        [
            "kind",
            "time",
            "step",
            "epoch",
            "status",
            "state",
            "name",
            "monitor",
            "mode",
            "best",
            "last",
            "total_steps",
            "message",
        ]
    )
    records = st.lists(
        st.dictionaries(keys, st.one_of(anything, st.sampled_from(["start", "end", "phase"]))), max_size=4
    )
    with TemporaryDirectory() as folder:
        make_run(Path(folder) / "good")
        bad = make_run(Path(folder) / "bad")
        for file in ("events.jsonl", "metrics.jsonl"):
            lines(bad / file, data.draw(records))
        for file in ("status.json", "result.json"):
            (bad / file).write_text(json.dumps(next(iter(data.draw(records)), {})))
        found = {run.id: run for run in list_runs(Path(folder))}
        assert found["good"].status.state == "finished"
        run_table(list(found.values()), differing(found.values()))
        assert "<h1>" in report([bad])
        assert isinstance(found["bad"].status.step, int)
