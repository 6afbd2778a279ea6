"""PrometheusExporter over HTTP, read by the parser of Prometheus' own client."""

import http.client
import logging
import socket
import threading
import time
import urllib.request

import pytest
import torch
from torch import nn

import etude
from etude.callbacks import Callback, PrometheusExporter
from etude.core import ConfigError

parser = pytest.importorskip("prometheus_client.parser")

DATA = (torch.randn(64, 4), torch.randint(0, 3, (64,)))


def scrape(exporter):
    with urllib.request.urlopen(exporter.address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    assert all(one.type == "gauge" for one in families)
    return {
        (one.name, one.labels.get("group"), one.labels.get("name")): one for each in families for one in each.samples
    }


class Scrapes(Callback):
    """Scrapes at the end of every epoch, when the exporter has got it."""

    def __init__(self, exporter):
        super().__init__()
        self.exporter, self.found, self.during_validation = exporter, [], []

    def on_validation_begin(self, epoch):
        self.during_validation.append(scrape_when(self.exporter, lambda found: True))

    def on_validation_cut_off(self, epoch):
        pass

    def on_epoch_end(self, epoch, logs):
        is_there = lambda found: len(self.exporter._metrics) == 2 and self.exporter._metrics["epoch"].epoch == epoch
        self.found.append(scrape_when(self.exporter, is_there))
        self.port = self.exporter._server.server_port


def scrape_when(exporter, condition):
    deadline = time.monotonic() + 60
    while not (exporter.address and condition(scrape(exporter))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return scrape(exporter)  # the condition may look at the exporter, which has got it after the last scrape


def train(*callbacks, epochs=2, name="run", **kwargs):
    config = {"epochs": epochs, "batch_size": 8, "log_interval": 2, "device": "cpu"}
    trainer = etude.Trainer(
        nn.Linear(4, 3), DATA, DATA, config=config, callbacks=list(callbacks), progress=False, name=name, **kwargs
    )
    return trainer.train()


def test_the_numbers_of_a_run(tmp_path):
    exporter = PrometheusExporter(port=0)
    scrapes = Scrapes(exporter)
    before = time.time()
    logs = train(exporter, scrapes, output_dir=tmp_path / "run")
    found = scrapes.found[-1]
    value = {key: one.value for key, one in found.items()}
    assert (value["etude_step", None, None], value["etude_epoch", None, None]) == (16, 1)
    assert value["etude_total_steps", None, None] == 16
    assert value["etude_metric", "epoch", "loss"] == logs["loss"]
    assert value["etude_metric", "val", "loss"] == logs["val_loss"]
    assert value["etude_metric", "speed", "samples_per_s"] > 0
    assert before - 1 < value["etude_last_step_timestamp_seconds", None, None] < time.time() + 1
    assert before - 1 < value["etude_last_checkpoint_timestamp_seconds", None, None] < time.time() + 1
    assert found["etude_run_info", None, None].labels["run_dir"] == str(tmp_path / "run")
    assert value["etude_validating", None, None] == 0
    assert scrapes.during_validation[-1]["etude_validating", None, None].value == 1
    with pytest.raises(OSError, match="refused"):  # the server has ended with the run
        socket.create_connection(("127.0.0.1", scrapes.port), timeout=5)


def test_step_and_time_are_those_of_the_scrape_between_log_points(monkeypatch):
    """A run that is stuck: the step stays, the clock on the wall goes on, the time of the last step does not."""
    exporter = PrometheusExporter(port=0)
    clock = etude.Clock()
    run = etude.callbacks.RunInfo("x", nn.Linear(1, 1), None, clock, torch.device("cpu"), None, None, None, None)
    exporter.on_train_begin(run)
    scrape_when(exporter, lambda found: True)
    now = time.time()
    for step, shown in ((5, 1000), (5, 1000), (6, 3000)):
        monkeypatch.setattr("etude.callbacks.sinks.prometheus.time.time", lambda: now + shown)
        clock.step = step
        if shown == 1000:
            scrape(exporter)
            monkeypatch.setattr("etude.callbacks.sinks.prometheus.time.time", lambda: now + 2000)
        found = scrape(exporter)
        assert found["etude_step", None, None].value == step
        assert found["etude_last_step_timestamp_seconds", None, None].value == pytest.approx(now + shown, abs=1e-3)
    exporter.on_train_end({})


def test_hostile_names_are_escaped():
    exporter = PrometheusExporter(port=0)
    hostile = 'a"b\\c\nd{} é 1 # TYPE x counter'
    clock = etude.Clock()
    run = etude.callbacks.RunInfo(hostile, nn.Linear(1, 1), None, clock, torch.device("cpu"), None, None, None, None)
    exporter.on_train_begin(run)
    values = {hostile: 1.5, "nan": float("nan"), "inf": float("inf"), "minus": float("-inf")}
    exporter.on_log(values)
    found = scrape_when(exporter, lambda found: ("etude_metric", "train", hostile) in found)
    one = found["etude_metric", "train", hostile]
    assert (one.value, one.labels["run"]) == (1.5, hostile)
    assert str(found["etude_metric", "train", "nan"].value) == "nan"
    assert found["etude_metric", "train", "inf"].value == float("inf")
    assert found["etude_metric", "train", "minus"].value == float("-inf")
    exporter.on_train_end({})


@pytest.mark.parametrize(
    ("host", "path", "code"),
    [
        ("127.0.0.1", "/metrics", 200),
        ("localhost:1", "/metrics", 200),
        ("127.0.0.1", "/", 404),
        ("evil.example", "/metrics", 403),
        ("127.0.0.1.evil.example", "/metrics", 403),
        ("", "/metrics", 403),
    ],
)
def test_only_this_machine_is_served(host, path, code):
    before = {*threading.enumerate()}  # those of tests that break off
    exporter = PrometheusExporter(port=0)
    run = etude.callbacks.RunInfo(
        "x", nn.Linear(1, 1), None, etude.Clock(), torch.device("cpu"), None, None, None, None
    )
    exporter.on_train_begin(run)
    scrape_when(exporter, lambda found: True)
    connection = http.client.HTTPConnection(*exporter._server.server_address, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    assert connection.getresponse().status == code
    assert exporter._server.server_address[0] == "127.0.0.1"
    connection.close()
    exporter.on_train_end({})
    assert not [one for one in {*threading.enumerate()} - before if one.name.startswith("etude-prometheus")]


def test_a_port_that_is_taken_is_one_line(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, logger="etude"):
            assert train(PrometheusExporter(port), epochs=1)["loss"] > 0
    messages = [one.getMessage() for one in caplog.records]
    assert len(messages) == 1
    assert f"port {port}" in messages[0]
    assert "training continues" in messages[0]


def test_a_port_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="port"):
        PrometheusExporter(70000)
