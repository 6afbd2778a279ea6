"""Alerts: rules in words, fired once, to the page and to a webhook."""

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from dashboard_runs import make_run, train, write

from etude.core.errors import ConfigError
from etude.dashboard.alerts import Alerts, Webhook, parse_rule
from etude.dashboard.catalogue import Run

STATE = {"state": "running", "name": "toy", "step": 3, "monitor": "val_loss", "best": {"value": 1.0}}


@pytest.mark.parametrize(
    "text", ["", "loss", "loss > x", "loss >> 3", "no step for -1 min", "state is odd", "a > 2 * b"]
)
def test_unknown_rules_are_refused(text):
    with pytest.raises(ConfigError, match="val_loss > 2"):
        parse_rule(text)


@pytest.mark.parametrize(
    ("rule", "record", "holds"),
    [
        ("loss > 2", {"loss": 2.5}, True),
        ("loss > 2", {"loss": 2}, False),
        ("loss>=2", {"loss": 2}, True),
        ("loss < 1e-3", {"loss": 0.0}, True),
        ("loss > 2", {"lr": 3}, None),
        ("loss > 2", {"loss": None}, None),
        ("loss is nan", {"loss": None}, True),
        ("loss is nan", {"loss": 1.0}, False),
        ("val_loss > 2 * best", {"val_loss": 2.1}, True),
        ("val_loss > 2 * best", {"val_loss": 1.9}, False),
        ("val_loss > best", {"val_loss": 1.1}, True),
        ("loss > 2 * best", {"loss": 9.0}, None),  # the run is not judged by it
        ("quality/loss > 0.5", {"quality/loss": 1}, True),
    ],
)
def test_rules_about_records(rule, record, holds):
    assert parse_rule(rule).holds_for(record, STATE) is holds


def test_rules_about_the_state():
    no_step = parse_rule("no step for 2 min")
    assert no_step.holds_now(STATE | {"last_step_time": 1000.0}, 1121.0)
    assert not no_step.holds_now(STATE | {"last_step_time": 1000.0}, 1119.0)
    assert not no_step.holds_now(STATE | {"last_step_time": 1000.0, "state": "finished"}, 9999.0)
    assert parse_rule("state is Failed").holds_now(STATE | {"state": "failed"}, 0.0)


def test_an_alert_is_given_once_until_it_no_longer_holds(tmp_path):
    folder, fired = make_run(tmp_path / "a", [train(1, loss=1.0)], state=None), []
    alerts, run = Alerts(["loss > 2"], fired.append), Run("a", folder)

    def log(*losses):
        write(folder / "metrics.jsonl", [train(9, loss=loss) for loss in losses], "a")
        alerts.check(run, STATE)
        return len(fired)

    alerts.check(run, STATE)
    assert not fired
    assert log(3.0, 4.0) == 1
    assert log(5.0) == 1
    assert log(1.0, 3.0, 1.0) == 2  # a spike between two looks
    write(tmp_path / "new", [train(1, loss=3.0), train(2, loss=1.0)])
    (tmp_path / "new").replace(folder / "metrics.jsonl")  # a resume keeps records of before
    assert log() == 2
    assert log(3.0) == 3
    assert fired[0]["run"] == "a"
    assert "loss > 2" in fired[0]["message"]


def test_what_ended_before_is_no_news(tmp_path):
    folder, fired = make_run(tmp_path / "a", [train(1, loss=9.0)]), []
    alerts, run = Alerts(["loss > 2", "state is finished"], fired.append), Run("a", folder)
    alerts.check(run, STATE | {"state": "finished"})
    assert not fired
    alerts.check(run, STATE)
    alerts.check(run, STATE | {"state": "finished"})
    assert [one["rule"] for one in fired] == ["loss > 2", "state is finished"]


def test_rules_are_added_and_removed_over_the_api(client, tmp_path):
    assert client.post("/api/alerts", json={"rule": "loss  is nan"}).json()["rules"] == ["loss is nan"]
    assert client.post("/api/alerts", json={"rule": "what"}).status_code == 400
    assert client.post("/api/alerts", json={"rule": 3}).status_code == 400
    assert json.loads((tmp_path / ".etude-dashboard.json").read_text())["alerts"] == ["loss is nan"]
    remove = {"method": "DELETE", "url": "/api/alerts", "json": {"rule": "loss is nan"}}
    assert client.request(**remove).json()["rules"] == []
    assert client.request(**remove).status_code == 404


@pytest.fixture
def receiver():
    """A server for webhooks: its address, what it got, and the status of its next answers."""
    got, status = queue.Queue(), [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status[0])
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got, status
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_alerts_and_its_failure_is_reported_once(receiver):
    url, got, status = receiver
    problems = queue.Queue()
    webhook = Webhook(url, problems.put)
    webhook.send({"message": "m", "rule": "r"})
    assert got.get(timeout=20) == {"text": "m", "message": "m", "rule": "r"}
    status[0] = 302  # redirects are not followed
    for _ in range(3):
        webhook.send({"message": "again"})
    assert "webhook failed" in problems.get(timeout=20)
    for _ in range(3):
        got.get(timeout=20)
    assert problems.empty()


def test_a_dashboard_sends_alerts_of_live_runs(serve, tmp_path, receiver):
    url, got, _ = receiver
    folder = make_run(tmp_path / "a", [train(1, loss=1.0)], state=None)
    (tmp_path / ".etude-dashboard.json").write_text(json.dumps({"alerts": ["loss is nan", "nonsense"]}))
    (folder / "status.json").write_text(json.dumps({"time": time.time() + 3600, "state": "running", "step": 1}))
    served = serve(tmp_path, "--port", "0", "--webhook", url)
    write(folder / "metrics.jsonl", [train(2, loss=None, nonfinite=["loss"])], "a")
    alert = got.get(timeout=20)
    assert (alert["run"], alert["rule"], alert["step"]) == ("a", "loss is nan", 2)
    assert "a), step 2" in alert["text"]
    code, errors = served.end()
    assert code == 0
    assert errors.count("\n") == 1
    assert "nonsense" in errors
