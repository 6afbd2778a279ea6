"""Built-in callbacks; the protocol itself is in `etude.engine.callback`."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.callbacks.csv_logger import CSVLogger
    from etude.callbacks.early_stopping import EarlyStopping
    from etude.callbacks.ema import EMA
    from etude.callbacks.events import EventCallback, Telemetry
    from etude.callbacks.find_nonfinite import FindNonfinite
    from etude.callbacks.freeze import Freeze
    from etude.callbacks.gradient_health import GradientHealth
    from etude.callbacks.gradient_monitor import GradientMonitor
    from etude.callbacks.lr_schedule import LRSchedule
    from etude.callbacks.model_checkpoint import ModelCheckpoint
    from etude.callbacks.progress import ProgressDisplay
    from etude.callbacks.recorder import RunRecorder
    from etude.callbacks.reduce_on_plateau import plateau
    from etude.callbacks.sinks.base import SinkCallback
    from etude.callbacks.sinks.mlflow import MLflowLogger
    from etude.callbacks.sinks.opentelemetry import OpenTelemetryLogger
    from etude.callbacks.sinks.prometheus import PrometheusExporter
    from etude.callbacks.sinks.tensorboard import TensorBoardLogger
    from etude.callbacks.sinks.trackio import TrackioLogger
    from etude.callbacks.sinks.wandb import WandbLogger
    from etude.callbacks.text_samples import TextSamples
    from etude.engine.callback import Callback, RunInfo
    from etude.engine.callback_list import CallbackList

__all__ = [
    "EMA",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "EventCallback",
    "FindNonfinite",
    "Freeze",
    "GradientHealth",
    "GradientMonitor",
    "LRSchedule",
    "MLflowLogger",
    "ModelCheckpoint",
    "OpenTelemetryLogger",
    "ProgressDisplay",
    "PrometheusExporter",
    "RunInfo",
    "RunRecorder",
    "SinkCallback",
    "Telemetry",
    "TensorBoardLogger",
    "TextSamples",
    "TrackioLogger",
    "WandbLogger",
    "plateau",
]

__getattr__ = load_late(__name__, __file__)
