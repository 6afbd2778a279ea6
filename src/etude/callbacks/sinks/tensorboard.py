"""Write a run for TensorBoard: scalars, the config, histograms, pictures and texts."""

import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt
from torch import Tensor

from etude.callbacks.monitored import resolve
from etude.callbacks.sinks.base import ThinnedSink, config_text, curve_of, curves_at, scalars
from etude.callbacks.sinks.histograms import BINS, measure
from etude.config.registry import register
from etude.core import RunFolderError
from etude.core.arguments import checked
from etude.engine.callback import Gradients, Logs, RunInfo
from etude.metrics.picture import matrix_png
from etude.monitor.events import Event, MediaLogged, Message, MetricsEvent, RunEnded, RunStarted

_NUMBER = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramsMeasured(Event):
    """Histograms of a step, by name: see `histograms.measure`."""

    histograms: Mapping[str, Sequence[float]]


@register("callback", "tensorboard")
class TensorBoardLogger(ThinnedSink):
    """Writes everything to `log_dir`, in the run folder if it is a relative path: `tensorboard --logdir runs`.

    Scalars are grouped: train, val, epoch, speed. With `histograms_every` there are histograms of the weights and
    gradients of every parameter every so many steps. A resumed run continues its curves. Of log points that come faster
    than `points_per_s` only some are written: TensorBoard shows a thousand points of a curve.
    """

    label = "tensorboard"
    package = "tensorboard.compat.proto.event_pb2"

    @checked
    def __init__(
        self,
        log_dir: str = "tensorboard",
        histograms_every: Annotated[int, Ge(1)] | None = None,
        points_per_s: Annotated[float, Gt(0.0)] | None = 20.0,
    ) -> None:
        super().__init__(points_per_s)
        self.log_dir, self.histograms_every = log_dir, histograms_every
        self._folder = Path(log_dir)
        self._pending: list[tuple[int, int, list[str], Tensor]] = []
        """Step, epoch, names and rows of histograms that are still on the device."""
        self._resumed_at = -1
        self._written: set[str] = set()
        """Curves that already have a point at the step that the run was resumed from."""
        self._file: Any = None
        if histograms_every is not None:  # without them it needs no layers, and steps need not call it
            self.gradients_every = histograms_every
            self.on_gradients = self._measure  # type: ignore[method-assign]

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return a name that two of them with one folder have in common."""
        return (str(Path(arguments["log_dir"]) / "events.out.tfevents"),)

    # --- on the thread of the training

    def begin(self, run: RunInfo) -> None:
        """Make the folder."""
        super().begin(run)
        self._pending = []
        self._folder = resolve(self.log_dir, run)
        self._resumed_at = run.clock.step or -1
        self._written = curves_at(run.run_dir, self._resumed_at)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"TensorBoardLogger cannot write {self._folder}: {error.strerror or error}; choose another log_dir"
            ) from error

    def _measure(self, gradients: Gradients) -> None:
        if self._worker is not None:
            self._pending.append((self._clock.step + 1, self._epoch, *measure(gradients)))

    def on_log(self, record: Logs) -> None:
        """Pass on histograms, where the host waits for the device anyway, and the log point."""
        if self._pending:
            self._read()
        super().on_log(record)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Pass on histograms since the last log point, and the epoch."""
        self._read()
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, result: Logs) -> None:
        """Pass on histograms since the last log point, and the end."""
        self._read()
        super().on_train_end(result)

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        for step, epoch, names, rows in pending:
            found = dict(zip(names, rows.tolist(), strict=True))  # synchronises, at a log point
            self.receive(HistogramsMeasured(time=time.time(), step=step, epoch=epoch, histograms=found))

    # --- on the thread of the sink

    def open_run(self, start: RunStarted) -> None:
        """Start a file; readers drop what earlier files have after the step that a run is resumed from."""
        from tensorboard.compat.proto.event_pb2 import Event as Record, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBER)}"
        self._file = RecordWriter((self._folder / name).open("ab"))
        begins = SessionLog(status=SessionLog.START)
        for record in (
            Record(wall_time=start.time, file_version="brain.Event:2"),
            Record(wall_time=start.time, step=self._resumed_at + 1, session_log=begins),
        ):
            self._file.write(record.SerializeToString())
        if text := config_text(start.run_dir):
            self._write_one(start, _text("config", _block(text)))
        self._file.flush()

    def write(self, events: list[Event]) -> None:
        """Write events to the file, together."""
        for event in events:
            if event.step != self._resumed_at or curve_of(event) not in self._written:
                self._write_one(event, _summary_of(event))
        self._file.flush()

    def close_run(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_one(self, event: Event, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        if summary is not None:
            record = Record(wall_time=event.time, step=event.step, summary=summary)
            self._file.write(record.SerializeToString())


def _summary_of(event: Event) -> Any:
    """Return an event in TensorBoard's form; None if it has nothing to show."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    summary = Summary()
    match event:
        case MetricsEvent():
            for tag, value in scalars(event).items():
                summary.value.add(tag=tag, simple_value=value)
        case HistogramsMeasured():
            for tag, (low, high, total, squares, *counts) in event.histograms.items():
                if num := sum(counts):  # otherwise no value is finite
                    width = (high - low) / BINS
                    limits = [low + width * place for place in range(1, BINS)] + [high]
                    moments = {"min": low, "max": high, "num": num, "sum": total, "sum_squares": squares}
                    summary.value.add(tag=tag, histo=HistogramProto(**moments, bucket_limit=limits, bucket=counts))
        case MediaLogged(name=name, media="text", data=data):
            return _text(name, _block(str(data)))
        case MediaLogged(name=name, media="matrix", data={"matrix": matrix}):
            png, side = matrix_png(matrix)
            image = Summary.Image(height=side, width=side, colorspace=3, encoded_image_string=png)
            summary.value.add(tag=name, image=image)
        case MediaLogged(name=name, media="image", data=data):
            summary.value.add(tag=name, image=Summary.Image(encoded_image_string=Path(data).read_bytes()))
        case Message() | RunEnded():
            return _text(f"events/{event.kind}", event.message)
        case _:
            return None
    return summary


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="replace")], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])


def _block(text: str) -> str:
    """Return a text that TensorBoard, which reads Markdown, shows as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
