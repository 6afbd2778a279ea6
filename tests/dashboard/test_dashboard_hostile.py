"""Folders that hold anything: odd names, damaged and endless files, pipes, links, folders that disappear."""

import json
import os
import time

import pytest
from dashboard_runs import make_run, train, write
from starlette.testclient import TestClient

from etude.dashboard import catalogue
from etude.dashboard.server import make_app

PATHS = (
    "runs",
    "run?run={}",
    "series?run={}&name=loss",
    "limits?run={}",
    "media?run={}",
    "heatmap?run={}",
    "csv?run={}&name=loss",
)


def states(client):
    """Return the states of all runs; those that the first answers leave out are read meanwhile."""
    found = {"": "reading"}
    while "reading" in found.values():
        found = {run["id"]: run["state"] for run in client.get("/api/runs").json()["runs"]}
    return found


def ask_everything(client, key):
    for path in PATHS:
        answer = client.get(f"/api/{path}".format(key))
        assert answer.status_code == 200, (path, answer.text)
    assert client.get(f"/api/diff?run={key}&run=good").status_code == 200


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a..evil", "a b&run=c", "ü", "%2e%2e", "x\ny", "'\"`"])
def test_odd_names_are_only_text(client, tmp_path, name):
    folder = tmp_path / name.replace("/", "∕")
    make_run(folder, [train(1, **{name: 1.0})], config=f"name: {json.dumps(name)}\n")
    key = folder.name
    assert states(client) == {key: "finished"}
    found = client.get("/api/series", params={"run": key, "name": name}).json()["series"][0]
    assert found["x"] == [1]
    answer = client.get("/api/run", params={"run": key})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["run"]["names"] == {"train": [name]}


def test_names_that_are_not_utf8(client, tmp_path):
    try:
        make_run(tmp_path / os.fsdecode(b"r\xff"), [train(1, loss=1.0)])
    except OSError:
        pytest.skip("this file system refuses such names")
    make_run(tmp_path / "r\\xff", [train(1, loss=2.0)])
    found = states(client)
    assert len(found) == 2
    values = {
        client.get("/api/series", params={"run": key, "name": "loss"}).json()["series"][0]["last"][0] for key in found
    }
    assert values == {1.0, 2.0}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "{[: \x00"),
        ("config.yaml", "a: &a [*a]\nb: &b {c: *b}\n"),
        ("config.yaml", "l0: &l0 [x, x]\n" + "".join(f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}]\n" for n in range(1, 40))),
        ("config.yaml", "1: 2\n2020-01-01: 2020-01-01\nt: !!binary aGk=\n? [1, 2]\n: 3\n"),
        ("status.json", '{"time": "soon", "step": [], "best": 3, "interval_s": "x"}'),
        ("status.json", "[" * 100_000),
        ("result.json", '{"status": 3, "step": {}, "best": "x", "last": [1]}'),
        ("env.json", '{"device": "gpu", "git": 3}'),
        ("events.jsonl", '{"kind": "start", "time": {}, "total_steps": "many", "name": [1]}\n{"kind": 3}\n'),
        (
            "metrics.jsonl",
            '{"step": {}, "loss": "\\ud800", "\\ud800": 3}\n{"step": 1, "split": "train", "\\ud800": 3}\n',
        ),
        ("metrics.jsonl", "\x00" * 10_000),
        ("media.jsonl", '{"name": 1}\n{"name": "a", "media": "text", "step": 1e300}\n'),
    ],
)
def test_damaged_files(client, tmp_path, file, content):
    make_run(tmp_path / "good", [train(1, loss=1.0)])
    folder = make_run(tmp_path / "bad", [train(1, loss=1.0)])
    (folder / file).write_text(content)
    found = states(client)
    assert found["good"] == "finished"
    assert found["bad"] in ("finished", "unreadable", "lost")
    ask_everything(client, "bad")


def test_pipes_and_links_are_not_opened(client, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "split": "train", "secret": 1}\n')
    for name, file in (("pipe", "metrics.jsonl"), ("pipe2", "config.yaml"), ("pipe3", "status.json")):
        folder = make_run(tmp_path / "runs" / name)
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)
    for name, file in (("link", "metrics.jsonl"), ("link2", "git.diff")):
        folder = make_run(tmp_path / "runs" / name)
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(secret)
    pipe = make_run(tmp_path / "runs" / "pipe4")
    os.mkfifo(pipe / "git.diff")
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "runs" / "link")
    with TestClient(make_app(tmp_path / "runs"), base_url="http://localhost") as inside:
        found = states(inside)
        for key in found:
            for path in PATHS:
                assert "secret" not in inside.get(f"/api/{path}".format(key)).text
        assert (
            inside.get("/api/run?run=pipe").json()["run"]["message"]
            == "cannot be read: metrics.jsonl is not a regular file"
        )
        assert "not a regular file" in inside.get("/api/series?run=pipe&name=loss").json()["error"]
        subscribed = inside.app.state.dashboard.subscribe(["pipe", "link2", "nothing", "link"], ["0", "x"])
        assert [one.run.key for one in subscribed] == ["link2"]
    assert found == {
        "pipe": "unreadable", "pipe2": "unreadable", "pipe3": "unreadable", "pipe4": "finished",
        "link": "unreadable", "link2": "finished",
    }  # fmt: skip


def test_files_that_may_not_be_read(client, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    folder = make_run(tmp_path / "a", [train(1, loss=1.0)])
    (folder / "metrics.jsonl").chmod(0)
    assert states(client) == {"a": "finished"}
    assert client.get("/api/series?run=a&name=loss").json()["series"][0]["x"] == []


def test_a_folder_that_disappears(client, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "SCAN_S", 0.0)
    folder = make_run(tmp_path / "a", [train(1, loss=1.0)])
    assert client.get("/api/series?run=a&name=loss").json()["series"][0]["x"] == [1]
    for path in folder.iterdir():
        path.unlink()
    client.get("/api/series?run=a&name=loss")
    assert client.get("/api/run?run=a").status_code in (200, 404)
    folder.rmdir()
    assert states(client) == {}
    assert client.get("/api/run?run=a").status_code == 404
    # another run of the same name is another run
    make_run(tmp_path / "a", [train(1, loss=5.0), train(2, loss=6.0)])
    assert client.get("/api/runs").json()["runs"][0]["id"] == "a"
    assert client.get("/api/series?run=a&name=loss").json()["series"][0]["last"] == [5.0, 6.0]


def test_a_folder_that_cannot_be_written_keeps_settings_in_memory(tmp_path, caplog):
    make_run(tmp_path / "a")
    (tmp_path / ".etude-dashboard.json").mkdir()
    with TestClient(make_app(tmp_path), base_url="http://localhost") as client:
        assert client.post("/api/tags", json={"run": "a", "tags": ["x"]}).status_code == 200
        assert client.post("/api/tags", json={"run": "a", "archived": True}).json()["tags"] == ["x"]
        assert client.get("/api/runs").json()["runs"][0]["tags"] == ["x"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"runs": {"a": 3, "b": {"tags": 3, "color": "x"}}, "alerts": {}}']
)
def test_damaged_settings(tmp_path, content):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    (tmp_path / ".etude-dashboard.json").write_text(content)
    with TestClient(make_app(tmp_path), base_url="http://localhost") as client:
        found = client.get("/api/runs").json()["runs"]
    assert sorted(run["color"] for run in found) == [0, 1]


def test_a_run_that_falls_silent_is_lost(client, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "AGAIN_S", -1.0)
    folder = make_run(tmp_path / "a", [train(1, loss=1.0)], state=None)
    beat = {"time": time.time() - 10, "state": "running", "step": 1, "interval_s": 1e-3}
    (folder / "status.json").write_text(json.dumps(beat | {"interval_s": 100}))
    assert states(client) == {"a": "running"}
    (folder / "status.json").write_text(json.dumps(beat))
    assert states(client) == {"a": "lost"}


def test_the_stream_tells_of_a_resume_and_of_new_and_removed_runs(tmp_path):
    from etude.dashboard.server import Dashboard
    from etude.dashboard.stream import Subscription

    folder = make_run(tmp_path / "a", [train(step, loss=1.0) for step in range(9)])
    board = Dashboard(tmp_path)
    sent = []
    board.hub.send = lambda kind, data: sent.append((kind, data))
    board.watch.poll()
    assert [(kind, [run["id"] for run in data]) for kind, data in sent] == [("runs", ["a"])]
    one = Subscription(board.catalogue.get("a"), board.store, None)
    assert one.poll() == []
    shorter = folder / "new"
    write(shorter, [train(step, loss=2.0) for step in range(4)])
    shorter.replace(folder / "metrics.jsonl")
    assert one.poll() == [("restart", {"run": "a"})]
    write(folder / "metrics.jsonl", [train(4, loss=3.0)], "a")
    ((kind, data),) = one.poll()
    assert (kind, data["records"]) == ("points", [train(4, loss=3.0)])
    # a cursor of a longer file that is gone
    assert Subscription(board.catalogue.get("a"), board.store, 10**9).poll() == [("restart", {"run": "a"})]
    # a file that was replaced by one as long, between the series and the stream
    board._read([board.catalogue.get("a")])
    cursor = (folder / "metrics.jsonl").stat().st_size
    write(shorter, [train(step, loss=9.0) for step in range(9)])
    shorter.replace(folder / "metrics.jsonl")
    assert Subscription(board.catalogue.get("a"), board.store, cursor).poll() == [("restart", {"run": "a"})]
    board.store.close()
