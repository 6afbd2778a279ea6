"""Sweeps by the API: what the folder says, also a hostile or a broken one."""

import json
import os

from page_runs import make
from sweep_folders import make_sweep, trial, write_trials


def test_a_sweep_is_found_with_its_trials_and_their_runs(client, tmp_path):
    made = make_sweep(tmp_path, "deep/search")
    make(tmp_path, "alone")
    (found,) = client.get("/api/sweeps").json()["sweeps"]
    assert (found["id"], found["name"], found["metric"], found["total"]) == ("deep/search", "search", "val_loss", 8)
    assert found["best"] == {"number": 3, "value": 0.4}
    assert found["states"] == {"complete": 4, "pruned": 1, "failed": 1, "running": 1}
    whole = client.get("/api/sweep", params={"sweep": "deep/search"}).json()
    assert [one["runs"] for one in whole["trials"]] == [[f"deep/search/{one['runs'][0]}"] for one in made]
    assert [one["params"] for one in whole["trials"]] == [one["params"] for one in made]
    assert whole["importance"] == {"optimizer.lr": 0.75, "model.act": 0.25}
    assert client.get("/api/sweep", params={"sweep": "deep"}).status_code == 404


def test_the_largest_value_is_the_best_where_it_should_be(client, tmp_path):
    write_trials_of = make_sweep(tmp_path)
    write_trials(tmp_path / "search", write_trials_of, mode="max")
    (found,) = client.get("/api/sweeps").json()["sweeps"]
    assert found["best"] == {"number": 0, "value": 0.9}


def test_runs_of_seeds_belong_to_the_trial_above_them(client, tmp_path):
    make(tmp_path, "search/trial-0000/seed-0")
    make(tmp_path, "search/trial-0000/seed-1", seed=1)
    runs = ["trial-0000/seed-0", "trial-0000/seed-1"]
    write_trials(tmp_path / "search", [trial(0, "complete", 0.5, runs=runs)])
    (found,) = client.get("/api/sweep?sweep=search").json()["trials"]
    assert found["runs"] == [f"search/{run}" for run in runs]


def test_a_change_of_the_file_is_seen(client, tmp_path):
    trials = make_sweep(tmp_path)
    assert client.get("/api/sweeps").json()["sweeps"][0]["states"]["running"] == 1
    write_trials(tmp_path / "search", [*trials[:-1], trial(6, "complete", 0.1)])
    (found,) = client.get("/api/sweeps").json()["sweeps"]
    assert found["best"] == {"number": 6, "value": 0.1}
    assert "running" not in found["states"]


def test_what_a_file_says_is_only_data(client, tmp_path):
    outside = tmp_path.parent / "outside"
    outside.mkdir(exist_ok=True)
    make(tmp_path, "search/trial-0000")
    file = tmp_path / "search" / "trials.json"
    for content in ("", "[]", "{", "[" * 100_000, '{"trials": 3, "space": [], "importance": "x", "metric": {}}'):
        file.write_text(content)
        assert client.get("/api/sweep?sweep=search").json()["trials"] == []
    odd = [3, {"number": "x"}, {"number": 1, "state": [], "value": "a", "params": 5, "runs": ["../../outside", 7]}]
    write_trials(tmp_path / "search", [*odd, trial(2, "complete", 10**400, error=["x"] * 9999)])
    found = client.get("/api/sweep?sweep=search").json()["trials"]
    assert [(one["number"], one["value"], one["runs"]) for one in found] == [(1, None, []), (2, None, [])]
    assert found[0]["state"] == "waiting"
    assert len(found[1]["error"]) <= 1000
    file.unlink()
    (outside / "trials.json").write_text(json.dumps({"name": "secret", "trials": []}))
    file.symlink_to(outside / "trials.json")
    assert client.get("/api/sweeps").json()["sweeps"] == []
    file.unlink()
    os.mkfifo(file)
    assert client.get("/api/sweeps").json()["sweeps"] == []
