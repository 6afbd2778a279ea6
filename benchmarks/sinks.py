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

THREADS = 1
"""Of torch: the other core is left to the threads of the sinks, as the cores beside a GPU are."""
BLOCK_STEPS = 200
SAMPLES = 60_000
"""Of an epoch, as MNIST has: every epoch ends with records of its own."""
INTERVALS = (1, 100)
COLUMNS = {"sinks": "", "log every": "d", "step µs": ".0f", "thread µs": ".1f", "%": "+.2f", "quartiles": ""}
SINKS: dict[str, tuple[str, Callable[[], Callback]]] = {
    "tensorboard": ("tensorboard", TensorBoardLogger),
    "prometheus": ("etude", lambda: PrometheusExporter(port=0)),
    "opentelemetry": ("opentelemetry", OpenTelemetryLogger),
    "wandb": ("wandb", lambda: WandbLogger(mode="offline")),
    "mlflow": ("mlflow", lambda: MLflowLogger(f"sqlite:///{os.environ['TRACKIO_DIR']}/mlflow.db")),
    "trackio": ("trackio", TrackioLogger),
}
"""The package that a sink needs, and how it is made."""


class Blocks(Callback):
    """Switches the sinks off and on in turns, and takes the time of each block of steps.

    The first block begins when all sinks are open; the last one is off, so that every block with sinks lies between two
    without.
    """

    def __init__(self, sinks: Sequence[Any], block_steps: int, pairs: int) -> None:
        super().__init__()
        self.block_steps, self.num_blocks = block_steps, 2 * pairs + 1
        self.step_us: list[float] = []
        """Time per step of each block."""
        self.queued_us: list[float] = []
        """CPU time of the training's thread in each call of a sink."""
        self._steps, self._begin, self._is_on = 0, 0.0, False
        self._opened = [threading.Event() for _ in sinks]
        for sink, opened in zip(sinks, self._opened, strict=True):
            sink.on_log, sink.open_run = self._switched(sink.on_log), _noting(sink.open_run, opened)

    @property
    def total_steps(self) -> int:
        """Number of steps, with a block to warm up."""
        return (self.num_blocks + 1) * self.block_steps

    def on_step_end(self, report: StepReport) -> None:
        self._steps += 1
        block, rest = divmod(self._steps, self.block_steps)
        if rest:
            return
        if block == 1:
            for one in self._opened:  # starting a tool is not part of a step
                assert one.wait(120)
        else:
            self.step_us.append((time.perf_counter() - self._begin) / self.block_steps * 1e6)
        self._is_on = block % 2 == 0
        self._begin = time.perf_counter()

    def more(self) -> list[float]:
        """Return the share that sinks add to each block, relative to the blocks before and after it."""
        times = self.step_us
        return [2 * times[on] / (times[on - 1] + times[on + 1]) - 1 for on in range(1, len(times), 2)]

    def _switched(self, on_log: Callable[[Logs], None]) -> Callable[[Logs], None]:
        def call(record: Logs) -> None:
            if self._is_on:
                begin = time.thread_time()
                on_log(record)
                self.queued_us.append((time.thread_time() - begin) * 1e6)

        return call


def _noting(open_run: Callable[[Any], None], opened: threading.Event) -> Callable[[Any], None]:
    def call(start: Any) -> None:
        open_run(start)
        opened.set()

    return call


def run(names: Sequence[str], interval: int, block_steps: int, pairs: int) -> Blocks:
    """Train once with sinks that are switched off and on."""
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, 1, 28, 28), torch.randint(10, (SAMPLES,))
    with tempfile.TemporaryDirectory() as folder:
        sinks = [SINKS[name][1]() for name in names]
        blocks = Blocks(sinks, block_steps, pairs)
        steps = blocks.total_steps
        config = {"max_steps": steps, "epochs": steps, "batch_size": 64, "log_interval": interval}
        trainer = Trainer(
            LeNet5(),
            data,
            config={**config, "device": "cpu", "save_checkpoints": False},
            callbacks=[*sinks, blocks],
            output_dir=f"{folder}/run",
            progress=False,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return blocks


def rows_of(interval: int, block_steps: int, pairs: int) -> list[Row]:
    """Measure each sink alone, and all of them together; `none` shows the noise."""
    there = [name for name in SINKS if is_there(name)]
    choices: dict[str, Sequence[str]] = {"none": [], **{name: [name] for name in there}, f"all {len(there)}": there}
    rows: list[Row] = []
    for title, names in choices.items():
        progress(f"{title}, every {interval}")
        blocks = run(names, interval, block_steps, pairs)
        low, middle, high = quartiles([100 * share for share in blocks.more()])
        log_points = len(blocks.queued_us) / max(1, len(names))
        rows.append(
            {
                "sinks": title,
                "log every": interval,
                "step µs": quartiles(blocks.step_us[::2])[1],
                "thread µs": sum(blocks.queued_us) / max(1.0, log_points),
                "%": middle,
                "quartiles": f"{low:+.2f} … {high:+.2f}",
            }
        )
    return rows + [{"sinks": name, "quartiles": NOT_INSTALLED} for name in SINKS if name not in there]


def is_there(name: str) -> bool:
    return find_spec(SINKS[name][0]) is not None


def set_up(folder: Path) -> None:
    """Keep everything in a folder, and OpenTelemetry in memory."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(THREADS)
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
    block_steps, pairs = (10, 1) if options.quick else (BLOCK_STEPS, 12)
    table = Table(
        "What other tools add to a step",
        COLUMNS,
        f"LeNet-5, batches of 64, CPU, {THREADS} thread. In one training the sinks are switched off and on in turns, "
        f"for {block_steps} steps each: the median of what a block with sinks takes more than those before and after. "
        "The row `none` switches nothing: its quartiles are the noise. Thread µs: CPU time of the training's thread "
        "per log point, in all sinks together.",
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # MLflow's artifacts are in the folder
        set_up(Path(folder))
        for interval in INTERVALS:
            table.rows.extend(rows_of(interval, block_steps, pairs))
    publish("sinks", [table], options)


if __name__ == "__main__":
    main()
