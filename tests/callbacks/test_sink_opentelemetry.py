"""OpenTelemetryLogger, read back from the exporters in memory of OpenTelemetry's own package."""

import pytest
import torch
from torch import nn

import etude
from etude.callbacks import Callback, OpenTelemetryLogger
from etude.core import ConfigError
from etude.monitor import RunFolder
from sink_stand_ins import provide

pytest.importorskip("opentelemetry.sdk")

DATA = (torch.randn(64, 4), torch.randint(0, 3, (64,)))


def train(*callbacks, epochs=2, **kwargs):
    config = {"epochs": epochs, "batch_size": 8, "log_interval": 2, "device": "cpu"}
    trainer = etude.Trainer(
        nn.Linear(4, 3), DATA, DATA, config=config, callbacks=list(callbacks), progress=False, **kwargs
    )
    return trainer.train()


def gauges(reader):
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    key = metric.name, point.attributes.get("group"), point.attributes.get("name")
                    found[key] = point.value
    return found


def test_metrics_and_spans_of_a_run(monkeypatch, tmp_path):
    reader, exporter = provide(monkeypatch)
    logs = train(OpenTelemetryLogger(), output_dir=tmp_path / "run", name="mine")
    found = gauges(reader)
    assert found["etude.metric", "epoch", "loss"] == logs["loss"]
    assert found["etude.metric", "val", "loss"] == logs["val_loss"]
    *_, last = (one for one in RunFolder(tmp_path / "run").read_metrics() if one["split"] == "train")
    assert found["etude.metric", "train", "loss"] == last["loss"]
    assert (found["etude.step", None, None], found["etude.epoch", None, None]) == (16, 1)

    spans = exporter.get_finished_spans()
    by_name = {name: [one for one in spans if one.name == name] for name in {one.name for one in spans}}
    assert {name: len(some) for name, some in by_name.items()} == {
        "etude.run": 1,
        "etude.epoch": 2,
        "etude.validation": 2,
        "etude.checkpoint": 2,
    }
    (run,) = by_name["etude.run"]
    assert (run.attributes["run"], run.attributes["status"], run.attributes["step"]) == ("mine", "finished", 16)
    for epoch, validation in zip(by_name["etude.epoch"], by_name["etude.validation"], strict=True):
        assert epoch.parent.span_id == run.context.span_id
        assert validation.parent.span_id == epoch.context.span_id
        assert run.start_time <= epoch.start_time <= validation.start_time <= validation.end_time <= epoch.end_time
    assert all(one.parent.span_id == run.context.span_id for one in by_name["etude.checkpoint"])
    assert by_name["etude.checkpoint"][-1].attributes["path"].endswith("step-00000016")
    assert by_name["etude.validation"][-1].attributes["val/loss"] == logs["val_loss"]


def test_an_error_is_the_status_of_the_run_and_warnings_are_its_events(monkeypatch):
    _, exporter = provide(monkeypatch)

    class Raises(Callback):
        def on_epoch_end(self, epoch, logs):
            self.notify("it gets worse")
            raise ArithmeticError("too bad")

    with pytest.raises(ArithmeticError):
        train(OpenTelemetryLogger(), Raises())
    run = next(one for one in exporter.get_finished_spans() if one.name == "etude.run")
    assert run.status.status_code.name == "ERROR"
    assert run.status.description == "ArithmeticError: too bad"
    assert "it gets worse" in [one.name for one in run.events]
    assert [one.name for one in exporter.get_finished_spans()].count("etude.epoch") == 1


def test_two_runs_in_one_process(monkeypatch, caplog):
    reader, exporter = provide(monkeypatch)
    train(OpenTelemetryLogger(), epochs=1)
    train(OpenTelemetryLogger(), epochs=1)
    assert [one.name for one in exporter.get_finished_spans()].count("etude.run") == 2
    assert gauges(reader)["etude.step", None, None] == 8
    assert "already" not in caplog.text


def test_nowhere_to_send_to_is_refused(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="endpoint"):
        train(OpenTelemetryLogger())


def test_an_endpoint_receives_both(monkeypatch):
    """A server that counts requests stands for a collector."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    paths = set()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.add(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    train(OpenTelemetryLogger(endpoint=f"http://127.0.0.1:{server.server_port}/"), epochs=1)
    server.shutdown()
    server.server_close()
    assert paths == {"/v1/metrics", "/v1/traces"}
