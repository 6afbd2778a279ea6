"""The JSON API: what it says about runs, and what it refuses."""

import csv
import io
import json
import os

import pytest
from dashboard_runs import START, make_run, train, write


def test_runs_and_one_run(client, tmp_path):
    records = [train(5, loss=1.0), {"step": 5, "epoch": 0, "split": "val", "time": START, "val_loss": 0.5}]
    folder = make_run(tmp_path / "deep" / "a", records, total_steps=10, steps_per_epoch=5, parameters=42)
    (folder / "env.json").write_text(json.dumps({"git": {"commit": "abc"}}))
    (folder / "git.diff").write_text("+ a line")
    (found,) = client.get("/api/runs").json()["runs"]
    assert {key: found[key] for key in ("id", "name", "state", "step", "total_steps", "progress", "monitor")} == {
        "id": "deep/a", "name": "toy", "state": "finished", "step": 5, "total_steps": 10, "progress": 0.5,
        "monitor": "val_loss",
    }  # fmt: skip
    assert found["names"] == {"train": ["loss"], "val": ["val_loss"]}
    assert found["config"] == {"name": "toy", "training.epochs": 2}
    assert (found["tags"], found["archived"], found["parameters"]) == ([], False, 42)
    one = client.get("/api/run", params={"run": "deep/a"}).json()
    assert one["config"] == {"name": "toy", "training": {"epochs": 2}}
    assert one["env"] == {"git": {"commit": "abc"}}
    assert one["git_diff"] == "+ a line"
    assert [event["kind"] for event in one["events"]] == ["start", "end"]
    assert one["run"] == found


def test_many_runs_are_answered_in_part_the_newest_first(client, tmp_path, monkeypatch):
    monkeypatch.setattr("etude.dashboard.server.PATIENCE_S", 0.0)
    for number in (1, 2, 3):
        folder = make_run(tmp_path / str(number), [train(5, loss=1.0)])
        os.utime(folder / "metrics.jsonl", (START, START + 10 * (number == 2) + number))
    states = [[run["state"] for run in client.get("/api/runs").json()["runs"]] for _ in range(3)]
    assert states == [["reading", "finished", "reading"], ["reading", "finished", "finished"], ["finished"] * 3]
    sent = []
    board = client.app.state.dashboard
    board.hub.send = lambda kind, data: sent.append((kind, [run["state"] for run in data]))
    board.watch.poll()
    assert sent == [("runs", ["finished"] * 3)]


def test_a_folder_that_is_a_run_itself(tmp_path, client):
    make_run(tmp_path, [train(1, loss=1.0)])
    assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == ["."]
    assert client.get("/api/series?run=.&name=loss").json()["series"][0]["x"] == [1]


def test_series_of_several_runs_and_names(client, tmp_path):
    make_run(tmp_path / "a", [train(1, loss=1.0, lr=0.1), train(2, loss=None, lr=0.2, nonfinite=["loss"])])
    make_run(tmp_path / "b", [train(1, loss=3.0)])
    found = client.get("/api/series?run=a&run=b&name=loss&name=lr").json()["series"]
    assert [(one["run"], one["name"], one["x"], one["last"]) for one in found] == [
        ("a", "loss", [1, 2], [1.0, None]),
        ("a", "lr", [1, 2], [0.1, 0.2]),
        ("b", "loss", [1], [3.0]),
        ("b", "lr", [], []),
    ]
    assert found[0]["nonfinite"] == [2]
    assert found[0]["exact"]


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/api/series?run=a", 400, "metric"),
        ("/api/series?name=loss", 400, "run"),
        ("/api/series?run=a&name=loss&x=weeks", 400, "weeks"),
        ("/api/series?run=a&name=loss&from=soon", 400, "soon"),
        ("/api/series?run=a&name=loss&from=nan", 400, "nan"),
        ("/api/run?run=b", 404, "b"),
        ("/api/media?run=a&name=x", 404, "x"),
        ("/api/media?run=a&name=x&step=inf", 400, "step"),
        ("/api/nothing", 404, "Not Found"),
    ],
)
def test_mistakes_are_one_line(client, tmp_path, path, status, word):
    make_run(tmp_path / "a")
    answer = client.get(path)
    assert answer.status_code == status
    assert word in answer.json()["error"]


def test_only_what_differs(client, tmp_path):
    for name, rate, commit in (("a", 0.1, "x"), ("b", 0.2, "y")):
        folder = make_run(tmp_path / name, config=f"name: toy\nseed: 1\noptimizer:\n  lr: {rate}\n")
        (folder / "env.json").write_text(json.dumps({"git": {"commit": commit}, "cpu_threads": 2}))
    assert client.get("/api/diff?run=a&run=b").json() == {
        "config": [{"key": "optimizer.lr", "values": [0.1, 0.2]}],
        "env": [],
        "git": [{"key": "commit", "values": ["x", "y"]}],
    }


def test_heatmap_has_the_highest_of_every_bucket(client, tmp_path):
    records = [train(step, **{"grad_norm/a": float(step), "grad_norm/b": 5.0, "loss": 1.0}) for step in range(100)]
    make_run(tmp_path / "a", records)
    found = client.get("/api/heatmap?run=a&prefix=grad_norm/&pixels=10").json()
    assert found["rows"] == ["a", "b"]
    assert len(found["x"]) == 10
    assert found["cells"][0] == [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]
    assert found["cells"][1] == [5.0] * 10
    assert client.get("/api/heatmap?run=a&prefix=no/").json()["cells"] == []


def test_media_by_name_and_step(client, tmp_path):
    folder = make_run(tmp_path / "a")
    records = [
        {"time": 1.0, "kind": "media", "step": step, "epoch": 0, "name": "text", "media": "text", "data": f"é{step}"}
        for step in (1, 2)
    ]
    picture = {"kind": "media", "step": 2, "name": "p", "media": "image"}
    outside = tmp_path / "outside.png"
    png = b"\x89PNG\r\n\x1a\nrest"
    outside.write_bytes(png)
    (folder / "plots").mkdir()
    (folder / "plots" / "p.png").write_bytes(png)
    (folder / "plots" / "link.png").symlink_to(outside)
    (folder / "plots" / "x.svg").write_text("<svg onload=alert(1)>")
    paths = {
        1: "elsewhere/a/plots/p.png",
        2: str(outside),
        3: "../outside.png",
        4: "plots/link.png",
        5: "plots/x.svg",
        6: "config.yaml",
    }
    pictures = [picture | {"step": step, "data": path} for step, path in paths.items()]
    write(folder / "media.jsonl", records + pictures)
    listed = client.get("/api/media?run=a").json()
    assert listed == [
        {"name": "p", "media": "image", "steps": [1, 2, 3, 4, 5, 6]},
        {"name": "text", "media": "text", "steps": [1, 2]},
    ]
    assert client.get("/api/media?run=a&name=text&step=1").json() == records[0]
    assert client.get("/api/media?run=a&name=text").json() == records[1]
    answers = [client.get(f"/api/picture?run=a&name=p&step={step}") for step in paths]
    assert [answer.status_code for answer in answers] == [200, 404, 404, 404, 404, 404]
    assert answers[0].content == png
    assert answers[0].headers["content-type"] == "image/png"


def test_csv_holds_every_record(client, tmp_path):
    make_run(tmp_path / "a", [train(1, loss=1.5), train(2, lr=0.1), train(3, loss=None), train(4, loss=2.5, lr=1)])
    answer = client.get("/api/csv?run=a&name=loss&name=lr")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["run"], row["step"], row["loss"], row["lr"]) for row in rows] == [
        ("a", "1", "1.5", ""), ("a", "2", "", "0.1"), ("a", "3", "", ""), ("a", "4", "2.5", "1")
    ]  # fmt: skip
    assert "attachment" in answer.headers["content-disposition"]


def test_tags_colors_and_archive_last(client, tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    colors = {run["id"]: run["color"] for run in client.get("/api/runs").json()["runs"]}
    assert sorted(colors.values()) == [0, 1]
    said = client.post("/api/tags", json={"run": "b", "tags": ["good", " good ", ""], "archived": True})
    assert said.json() == {"tags": ["good"], "archived": True, "color": colors["b"]}
    make_run(tmp_path / "0")
    from starlette.testclient import TestClient

    from etude.dashboard.server import make_app

    with TestClient(make_app(tmp_path), base_url="http://localhost") as again:
        found = {run["id"]: run for run in again.get("/api/runs").json()["runs"]}
    assert {key: found[key]["color"] for key in colors} == colors
    assert found["0"]["color"] == 2
    assert (found["b"]["tags"], found["b"]["archived"]) == (["good"], True)
    for wrong in ({"run": "b", "tags": "x"}, {"run": "b", "archived": 1}, [1], {"run": "b", "tags": [1]}):
        assert client.post("/api/tags", json=wrong).status_code == 400
    assert client.post("/api/tags", json={"run": "nothing"}).status_code == 404
    assert client.post("/api/tags", json={"run": "b", "tags": ["x" * 100_000]}).status_code == 413


@pytest.mark.parametrize(
    ("values", "device", "words"),
    [
        ({"data_wait": 0.5, "mfu": 0.1}, {}, "50% of the time is spent waiting for batches"),
        ({"data_wait": 0.01, "mfu": 0.6}, {}, "near what it can"),
        (
            {"data_wait": 0.01, "mfu": 0.03, "memory_bytes": 10},
            {"memory_bytes": 100},
            "90% of the device's memory is free",
        ),
        ({"data_wait": 0.01, "memory_bytes": 99}, {"memory_bytes": 100}, "almost full"),
        ({"data_wait": 0.01}, {}, "The step itself"),
    ],
)
def test_what_limits_a_run(client, tmp_path, values, device, words):
    folder = make_run(tmp_path / "a", [train(step, samples_per_s=100.0, **values) for step in range(30)])
    (folder / "env.json").write_text(json.dumps({"device": device}))
    found = client.get("/api/limits?run=a").json()
    assert words in found["words"]
    assert found["samples_per_s"] == 100.0
    assert found["tokens_per_s"] is None


def test_a_run_that_became_slower(client, tmp_path):
    make_run(tmp_path / "b")
    make_run(tmp_path / "a", [train(step, samples_per_s=100.0 if step < 50 else 50.0) for step in range(100)])
    assert "slower: 50 samples per second, 100" in client.get("/api/limits?run=a").json()["words"]
    assert client.get("/api/limits?run=b").json()["words"] == "There is no log point yet."


def test_a_run_that_begins_while_a_page_is_open_has_a_color_of_its_own(tmp_path, monkeypatch):
    from etude.dashboard.server import Dashboard

    monkeypatch.setattr("etude.dashboard.catalogue.SCAN_S", 0.0)
    make_run(tmp_path / "a", [train(5, loss=1.0)])
    board, sent = Dashboard(tmp_path), []
    monkeypatch.setattr(board.hub, "send", lambda kind, data: sent.append((kind, data)))
    board.runs(None)
    make_run(tmp_path / "b", [train(5, loss=1.0)])
    board.watch.poll()
    ((kind, runs),) = sent
    assert kind == "runs"
    assert {run["id"]: run["color"] for run in runs} == {"a": 0, "b": 1}
    assert {run["id"]: run["color"] for run in Dashboard(tmp_path).runs(None)["runs"]} == {"a": 0, "b": 1}
    board.store.close()


def test_settings_in_another_order_are_no_difference(client, tmp_path):
    make_run(tmp_path / "a", config="callbacks: [{name: ema, decay: 0.9, every: 1}]\n")
    make_run(tmp_path / "b", config="callbacks: [{every: 1, name: ema, decay: 0.9}]\n")
    assert client.get("/api/diff?run=a&run=b").json()["config"] == []
