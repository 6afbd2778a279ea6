"""Stand-ins for packages that the tests do not install: they record the calls that sinks make."""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class Recorded:
    """One run in another tool, as its sink has described it."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.points: list[tuple[int, str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.params: dict[str, str] = {}
        self.artifacts: list[str] = []
        self.ended: Any = None

    def log(self, values, step):
        self.points += [(step, name, value) for name, value in values.items()]

    def finish(self, exit_code=0):
        self.ended = exit_code

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, one, value in self.points if one == name]


class MlflowException(Exception):
    """What MLflow raises."""


class MlflowClient:
    """As much of MLflow's client as the sink uses; the id of a run is its index."""

    def __init__(self, runs, tracking_uri):
        self.runs, self.uri = runs, tracking_uri

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"experiment {name}"

    def create_run(self, experiment_id, run_name):
        self.runs.append(Recorded(experiment=experiment_id, name=run_name, uri=self.uri))
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs) - 1)))

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(params=self.runs[int(run_id)].params))

    def update_run(self, run_id, status):
        assert status == "RUNNING"
        self.runs[int(run_id)].ended = None

    def log_batch(self, run_id, metrics=(), params=()):
        run = self.runs[int(run_id)]
        run.points += [(step, name, value) for name, value, _, step in metrics]
        run.params |= dict(params)

    def log_artifact(self, run_id, path, artifact_path=None):
        self.runs[int(run_id)].artifacts.append(path)

    def log_text(self, run_id, text, path):
        self.runs[int(run_id)].artifacts.append(path)

    log_dict = log_text

    def set_terminated(self, run_id, status):
        self.runs[int(run_id)].ended = status


def install(monkeypatch) -> dict[str, list[Recorded]]:
    """Put stand-ins in the place of wandb, trackio and mlflow; return the runs that each of them gets."""
    runs: dict[str, list[Recorded]] = {"wandb": [], "trackio": [], "mlflow": []}

    def add(tool: str, **arguments: Any) -> Recorded:
        runs[tool].append(Recorded(**arguments))
        return runs[tool][-1]

    def module(name: str, **attributes: Any) -> None:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)

    def media(kind: str):
        return lambda *args, **kwargs: (kind, args, kwargs)

    module(
        "wandb",
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")),
        login=lambda verify, prompt: True,
        init=lambda **arguments: add("wandb", **arguments),
        Settings=type("Settings", (dict,), {"model_fields": ()}),
        **{kind: media(kind) for kind in ("Table", "Html", "Image")},
    )
    module(
        "trackio",
        init=lambda project, **arguments: add("trackio", project=project, **arguments),
        **{kind: media(kind) for kind in ("Table", "Html", "Image")},
    )

    def get_logs(_project: str, name: str) -> list[dict[str, Any]]:
        known = [run for run in runs["trackio"] if run.arguments["name"] == name]
        return [{"step": step, key: value} for run in known for step, key, value in run.points]

    module("trackio.sqlite_storage", SQLiteStorage=SimpleNamespace(get_logs=get_logs))
    module("mlflow.exceptions", MlflowException=MlflowException)
    module("mlflow", MlflowClient=partial(MlflowClient, runs["mlflow"]))
    module("mlflow.entities", Metric=lambda *one: one, Param=lambda *one: one)
    return runs


def provide(monkeypatch) -> tuple[Any, Any]:
    """Set up OpenTelemetry as a program does; return the reader of metrics and the exporter of spans."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, exporter, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)  # the global one can be set only once
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    return reader, exporter


def read_tensorboard(folder) -> Any:
    """Return what TensorBoard reads in a folder, all of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "tensors", "histograms", "images")
    return EventAccumulator(str(folder), dict.fromkeys(kinds, 0)).Reload()


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """Return the curves that TensorBoard reads in a folder."""
    read = read_tensorboard(folder)
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
