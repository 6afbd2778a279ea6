"""What passing a run on to other tools adds to a step of LeNet-5, with log points every step and every 100 steps.

python -m benchmarks.sinks [--quick] [--json FILE]
"""

import contextlib
import io
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import NOT_INSTALLED, Row, Table, progress, publish, quartiles, read_options
from etude import Callback, LeNet5, Trainer
from etude.callbacks import (
    MLflowLogger,
    OpenTelemetryLogger,
    PrometheusExporter,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
)
from etude.core import StepReport
from etude.engine.callback import Logs

THREADS = 2
WARM_UP = 50
INTERVALS = (1, 100)
COLUMNS = {
    "sinks": "",
    "log every": "d",
    "step µs": ".0f",
    "thread µs": ".1f",
    "+µs": "+.0f",
    "%": "+.2f",
    "quartiles": "",
}
SINKS: dict[str, tuple[str, Callable[[], Callback]]] = {
    "tensorboard": ("tensorboard", TensorBoardLogger),
    "prometheus": ("etude", lambda: PrometheusExporter(port=0)),
    "opentelemetry": ("opentelemetry", OpenTelemetryLogger),
    "wandb": ("wandb", lambda: WandbLogger(mode="offline")),
    "mlflow": ("mlflow", lambda: MLflowLogger(f"sqlite:///{os.environ['TRACKIO_DIR']}/mlflow.db")),
    "trackio": ("trackio", TrackioLogger),
}
"""The package that a sink needs, and how it is made."""


class Clock(Callback):
    """Takes the CPU time of the process from one step to another, and of the training's thread inside `on_log`."""

    def __init__(self, sinks: Sequence[Any], last: int) -> None:
        super().__init__()
        self.last, self.steps, self.begin, self.us = last, 0, 0.0, 0.0
        self.queued: list[float] = []
        self.opened = [threading.Event() for _ in sinks]
        for sink, opened in zip(sinks, self.opened, strict=True):
            sink.on_log, sink.open_run = self._timed(sink.on_log), _told(sink.open_run, opened)

    def on_step_end(self, report: StepReport) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            for one in self.opened:  # starting a tool is not part of a step
                assert one.wait(120)
            self.begin = time.process_time()
        elif self.steps == self.last:
            self.us = (time.process_time() - self.begin) / (self.last - WARM_UP) * 1e6

    def _timed(self, on_log: Callable[[Logs], None]) -> Callable[[Logs], None]:
        def call(record: Logs) -> None:
            begin = time.thread_time()
            on_log(record)
            if self.steps > WARM_UP:
                self.queued.append((time.thread_time() - begin) * 1e6)

        return call


def _told(open_run: Callable[[Any], None], opened: threading.Event) -> Callable[[Any], None]:
    def call(start: Any) -> None:
        open_run(start)
        opened.set()

    return call


def run(names: Sequence[str], interval: int, steps: int) -> tuple[float, float]:
    """Train once; return the CPU time per step, and that of the training's thread per log point in all sinks."""
    torch.manual_seed(0)
    data = torch.randn(64 * 50, 1, 28, 28), torch.randint(10, (64 * 50,))
    with tempfile.TemporaryDirectory() as folder:
        sinks = [SINKS[name][1]() for name in names]
        clock = Clock(sinks, WARM_UP + steps)
        config = {"max_steps": WARM_UP + steps, "epochs": steps, "batch_size": 64, "log_interval": interval}
        trainer = Trainer(
            LeNet5(),
            data,
            config={**config, "device": "cpu", "save_checkpoints": False},
            callbacks=[*sinks, clock],
            output_dir=f"{folder}/run",
            progress=False,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return clock.us, sum(clock.queued) / max(1, steps // interval)


def rows_of(interval: int, rounds: int, steps: int) -> list[Row]:
    """Run without sinks, with each and with all of them in turns."""
    there = [name for name in SINKS if is_there(name)]
    choices: dict[str, Sequence[str]] = {name: [name] for name in there} | {f"all {len(there)}": there}
    plain: list[float] = []
    more: dict[str, list[float]] = {title: [] for title in choices}
    queued: dict[str, list[float]] = {title: [] for title in choices}
    for place in range(rounds):
        before = run((), interval, steps)[0]
        found = {}
        for title in list(choices)[:: 1 if place % 2 else -1]:
            progress(f"{title}, every {interval}: {place + 1} of {rounds}")
            found[title], spent = run(choices[title], interval, steps)
            queued[title].append(spent)
        plain.append((before + run((), interval, steps)[0]) / 2)
        for title, us in found.items():
            more[title].append(us - plain[-1])
    step = quartiles(plain)[1]
    rows: list[Row] = [{"sinks": "none", "log every": interval, "step µs": step}]
    for title in choices:
        low, middle, high = quartiles(more[title])
        shares = {"%": 100 * middle / step, "quartiles": f"{100 * low / step:+.2f} … {100 * high / step:+.2f}"}
        rows.append(
            {"sinks": title, "log every": interval, "+µs": middle, "thread µs": quartiles(queued[title])[1], **shares}
        )
    return rows + [{"sinks": name, "quartiles": NOT_INSTALLED} for name in SINKS if name not in there]


def is_there(name: str) -> bool:
    return find_spec(SINKS[name][0]) is not None


def set_up(folder: Path, threads: int) -> None:
    """Keep everything in a folder, and OpenTelemetry in memory."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    os.environ["TRACKIO_DIR"] = str(folder)
    if is_there("opentelemetry"):
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider

        metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
        trace.set_tracer_provider(TracerProvider())


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options(__doc__ or "", argv)
    rounds, steps = (1, 20) if options.quick else (5, 400)
    table = Table(
        "What other tools add to a step",
        COLUMNS,
        f"LeNet-5, batches of 64, CPU, {THREADS} threads. CPU time of the process per step, threads of the sinks "
        "included, without and with sinks in turns; the median of the differences. Thread µs: CPU time of the "
        "training's thread per log point, in all sinks together.",
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # MLflow's artifacts are in the folder
        set_up(Path(folder), 1 if options.quick else THREADS)
        for interval in INTERVALS:
            table.rows.extend(rows_of(interval, rounds, steps))
    publish("sinks", [table], options)


if __name__ == "__main__":
    main()
