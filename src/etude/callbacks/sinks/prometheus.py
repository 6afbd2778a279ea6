"""Show a run to Prometheus: numbers at http://127.0.0.1:PORT/metrics."""

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

from annotated_types import Ge, Le

from etude.callbacks.sinks.base import SinkCallback, scalars
from etude.config.registry import register
from etude.core import Clock
from etude.core.arguments import checked
from etude.engine.callback import Logs, RunInfo
from etude.monitor.events import CheckpointSaved, Event, MetricsEvent, RunStarted, StepsLogged, Warned

_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@register("callback", "prometheus")
class PrometheusExporter(SinkCallback):
    """Serves the last metrics of a run on this machine only; `port: 0` takes any free port, which `address` names.

    `etude_last_step_timestamp_seconds` is the time at which the step was last seen to grow, so that an alert finds a
    run that is stuck: `time() - etude_last_step_timestamp_seconds > 600 and etude_validating == 0`.
    """

    label = "prometheus"

    @checked
    def __init__(self, port: Annotated[int, Ge(0), Le(65535)] = 9464) -> None:
        super().__init__()
        self.port = port
        self.address = ""
        """Where it is served, while a run is trained."""
        self._server: ThreadingHTTPServer | None = None
        self._thread = threading.Thread()
        self._start = RunStarted(time=0.0)
        self._metrics: dict[str, MetricsEvent] = {}
        """The last validation and epoch."""
        self._record: Logs = {}
        """The last log point."""
        self._checkpoint_time = math.nan
        self._warnings = 0
        self._is_validating = False
        self._lock = threading.Lock()
        self._seen = (0, 0.0)
        """The step that was seen last, and when it was seen first."""

    # --- on the thread of the training

    def begin(self, run: RunInfo) -> None:
        """Forget an earlier run."""
        self._metrics, self._record = {}, {}
        self._warnings, self._checkpoint_time, self._is_validating = 0, math.nan, False
        self._seen = run.clock.step, time.time()

    def on_log(self, record: Logs) -> None:
        """Keep the record; it is put into words when somebody asks."""
        if self._worker is not None:
            self._record = record

    def on_validation_begin(self, epoch: int) -> None:
        """Show that no steps are taken now."""
        self._is_validating = True

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Show the metrics."""
        self._is_validating = False
        super().on_validation_end(epoch, metrics)

    def on_validation_cut_off(self, epoch: int) -> None:
        """Show that validation has ended."""
        self._is_validating = False

    # --- on the threads of the sink and of the server

    def open_run(self, start: RunStarted) -> None:
        """Start the server."""
        self._start = start
        try:
            server = ThreadingHTTPServer(("127.0.0.1", self.port), type("Handler", (_Handler,), {"text": self.text}))
        except OSError as error:
            raise OSError(f"port {self.port} cannot be used ({error.strerror or error}); set another port") from error
        server.daemon_threads = True
        self._server, self.address = server, f"http://127.0.0.1:{server.server_port}/metrics"
        serve = partial(server.serve_forever, poll_interval=0.05)  # the end of a run waits for it
        self._thread = threading.Thread(target=serve, name="etude-prometheus-server", daemon=True)
        self._thread.start()

    def write(self, events: list[Event]) -> None:
        """Keep the last metrics."""
        for event in events:
            if isinstance(event, MetricsEvent):
                self._metrics[event.split] = event
            elif isinstance(event, CheckpointSaved):
                self._checkpoint_time = event.time
            self._warnings += isinstance(event, Warned)

    def close_run(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server, self.address = None, ""

    def text(self) -> str:
        """Return all numbers in Prometheus' text format; step and rate are those of this moment."""
        return "".join(f"{line}\n" for line in self._lines(self._clock, self._start))

    def _lines(self, clock: Clock, start: RunStarted) -> Iterator[str]:
        with self._lock:
            if clock.step != self._seen[0]:
                self._seen = clock.step, time.time()
            last_step_time = self._seen[1]
        run = {"run": start.name, "run_dir": start.run_dir or ""}
        info = {"device": start.device, "monitor": start.monitor, "parameters": str(start.parameters)}
        yield from _gauge("etude_run_info", "What is trained.", [({**run, **info}, 1)])
        for name, help_, value in (
            ("step", "Optimizer steps taken.", clock.step),
            ("epoch", "Epochs completed.", clock.epoch),
            ("samples", "Samples trained on.", clock.samples),
            ("total_steps", "Optimizer steps of the whole run.", start.total_steps),
            ("last_step_timestamp_seconds", "When the step was last seen to grow.", last_step_time),
            ("last_checkpoint_timestamp_seconds", "When a checkpoint was last saved.", self._checkpoint_time),
            ("start_timestamp_seconds", "When the run was started or resumed.", start.time),
            ("validating", "1 during a validation.", int(self._is_validating)),
            ("warnings", "Warnings since the start.", self._warnings),
        ):
            if value is not None:
                yield from _gauge(f"etude_{name}", help_, [(run, value)])
        events = [StepsLogged(time=0.0, metrics=self._record), *list(self._metrics.values())]
        found = {tag: value for event in events for tag, value in scalars(event).items()}
        metrics = [
            ({**run, "group": tag.partition("/")[0], "name": tag.partition("/")[2]}, value)
            for tag, value in found.items()
        ]
        yield from _gauge("etude_metric", "Metrics of the last log point, validation and epoch.", metrics)


def _gauge(name: str, help_: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {help_}"
    yield f"# TYPE {name} gauge"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items())
        yield f"{name}{{{inside}}} {_number(value)}"


def _escaped(text: str) -> str:
    r"""Return a label's value between quotes.

    >>> _escaped('a"b\\c\nd')
    'a\\"b\\\\c\\nd'
    """
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET /metrics`, and only under a name of this machine: a page of another site may not read it."""

    text: Any
    timeout = 10

    def do_GET(self) -> None:
        """Answer a request."""
        host = self.headers.get("Host", "")
        if re.sub(r":\d+$", "", host) not in _HOSTS:
            self._answer(403, "this address is only served on this machine\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "metrics are at /metrics\n")
        else:
            self._answer(200, self.text())

    def _answer(self, code: int, text: str) -> None:
        data = text.encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
