"""Pass a run on to OpenTelemetry: metrics as gauges; the run, epochs, validations and checkpoints as spans."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from annotated_types import Gt

from etude.callbacks.sinks.base import ThinnedSink, import_package, scalars
from etude.config.registry import register
from etude.core import ConfigError
from etude.core.arguments import checked
from etude.engine.callback import RunInfo
from etude.monitor.events import (
    CheckpointSaved,
    EpochEnded,
    EpochStarted,
    Event,
    Message,
    MetricsEvent,
    RunEnded,
    RunStarted,
    Validated,
)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_GAUGES: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Instruments by provider: a second run in the process must not create them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Began(Event):
    """A validation or a checkpoint begins."""

    what: str


@register("callback", "opentelemetry")
class OpenTelemetryLogger(ThinnedSink):
    """Records metrics as the gauge `etude.metric` and spans of the run, its epochs, validations and checkpoints.

    They go to the OTLP `endpoint` (http://HOST:4318), or else to the providers that the program has set up, or to the
    endpoint of the variable OTEL_EXPORTER_OTLP_ENDPOINT. Of log points that come faster than `points_per_s` only some
    are recorded.
    """

    label = "opentelemetry"
    package = "opentelemetry.sdk"

    @checked
    def __init__(self, endpoint: str | None = None, points_per_s: Annotated[float, Gt(0.0)] | None = 4.0) -> None:
        super().__init__(points_per_s)
        self.endpoint = endpoint
        self._providers: tuple[Any, Any] = (None, None)
        """Those of metrics and of spans."""
        self._is_own = False
        self._name = ""
        self._spans: dict[str, Any] = {}
        self._began: dict[str, float] = {}

    # --- on the thread of the training

    def begin(self, run: RunInfo) -> None:
        """Find the providers; raise ConfigError if there are none."""
        from opentelemetry import metrics, trace

        super().begin(run)
        self._spans, self._began = {}, {}
        found = metrics.get_meter_provider(), trace.get_tracer_provider()
        is_set = any("Proxy" not in type(one).__name__ and "NoOp" not in type(one).__name__ for one in found)
        endpoint = self.endpoint or (None if is_set else os.environ.get(_ENDPOINT))
        if endpoint is None and not is_set:
            raise ConfigError(
                f"opentelemetry has nowhere to send to: set endpoint (http://HOST:4318) or {_ENDPOINT}, or set up "
                "providers before training"
            )
        self._is_own = endpoint is not None
        self._providers = found if endpoint is None else _providers(endpoint.rstrip("/"))

    def on_validation_begin(self, epoch: int) -> None:
        """Remember when it began."""
        self.receive(Began(**self._place(epoch), what="validation"))

    def on_validation_cut_off(self, epoch: int) -> None:
        """Nothing: a validation without an end has no span."""

    def on_save_begin(self) -> None:
        """Remember when it began."""
        super().on_save_begin()
        self.receive(Began(**self._place(), what="checkpoint"))

    # --- on the thread of the sink

    def open_run(self, start: RunStarted) -> None:
        """Begin the span of the run."""
        self._name = start.name
        facts = {"device": start.device, "parameters": start.parameters, "resumed": start.resumed}
        self._begin("run", start, {"run": start.name, "run_dir": start.run_dir or "", **facts})

    def write(self, events: list[Event]) -> None:
        """Record the events."""
        for event in events:
            if isinstance(event, MetricsEvent):
                self._set(event)
            match event:
                case EpochStarted():
                    self._finish("epoch", event)
                    self._begin("epoch", event, {"epoch": event.epoch})
                case EpochEnded():
                    self._finish("epoch", event)
                case Began():
                    self._began[event.what] = event.time
                case Validated():
                    self._whole("validation", event, {"step": event.step, **scalars(event)})
                case CheckpointSaved():
                    self._whole("checkpoint", event, {"step": event.step, "path": event.path})
                case Message():
                    self._spans["run"].add_event(event.message, {"kind": event.kind, "step": event.step}, _ns(event))
                case RunEnded():
                    self._end_run(event)

    def close_run(self) -> None:
        """Send what is left; what the program has set up stays open."""
        for span in self._spans.values():
            span.end()
        self._spans = {}
        for provider in self._providers:
            if self._is_own:
                provider.shutdown()
            elif type(provider).__module__.startswith("opentelemetry.sdk"):
                provider.force_flush()

    def _set(self, event: MetricsEvent) -> None:
        gauges = _gauges(self._providers[0])
        for name, value in scalars(event).items():
            group, _, metric = name.partition("/")
            gauges["metric"].set(value, {"run": self._name, "group": group, "name": metric})
        gauges["step"].set(event.step, {"run": self._name})
        gauges["epoch"].set(event.epoch, {"run": self._name})

    def _begin(self, what: str, event: Event, attributes: Mapping[str, Any], start: float | None = None) -> Any:
        from opentelemetry import trace

        parent = self._spans.get("epoch" if what != "epoch" else "run", self._spans.get("run"))
        context = None if parent is None else trace.set_span_in_context(parent)
        tracer = trace.get_tracer("etude", tracer_provider=self._providers[1])
        begin = _ns(event) if start is None else int(start * 1e9)
        span = tracer.start_span(f"etude.{what}", context, attributes=dict(attributes), start_time=begin)
        if what in ("run", "epoch"):
            self._spans[what] = span
        return span

    def _finish(self, what: str, event: Event) -> None:
        if (span := self._spans.pop(what, None)) is not None:
            span.end(_ns(event))

    def _whole(self, what: str, event: Event, attributes: Mapping[str, Any]) -> None:
        self._begin(what, event, attributes, self._began.get(what, event.time)).end(_ns(event))

    def _end_run(self, event: RunEnded) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._finish("epoch", event)
        run = self._spans["run"]
        run.set_attributes({"status": event.status, "step": event.step})
        run.set_status(Status(StatusCode.ERROR, event.message) if event.status == "failed" else StatusCode.OK)
        self._finish("run", event)


def _providers(endpoint: str) -> tuple[Any, Any]:
    """Return providers that send to an endpoint."""
    base = "opentelemetry.exporter.otlp.proto.http"
    metric_exporter = import_package(f"{base}.metric_exporter", "opentelemetry")
    trace_exporter = import_package(f"{base}.trace_exporter", "opentelemetry")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "etude"})
    exporter = metric_exporter.OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics")
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(trace_exporter.OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")))
    return MeterProvider([PeriodicExportingMetricReader(exporter)], resource=resource), tracers


def _gauges(provider: Any) -> dict[str, Any]:
    if provider not in _GAUGES:
        meter = provider.get_meter("etude")
        _GAUGES[provider] = {name: meter.create_gauge(f"etude.{name}") for name in ("metric", "step", "epoch")}
    return _GAUGES[provider]


def _ns(event: Event) -> int:
    return int(event.time * 1e9)
