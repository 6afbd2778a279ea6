"""Built-in callbacks; the protocol itself is in `etude.engine.callback`."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.callbacks.csv_logger import CSVLogger
    from etude.callbacks.device_stats import DeviceStats
    from etude.callbacks.early_stopping import EarlyStopping
    from etude.callbacks.ema import EMA
    from etude.callbacks.events import EventCallback, Telemetry
    from etude.callbacks.freeze import Freeze
    from etude.callbacks.gradient_health import GradientHealth
    from etude.callbacks.gradient_monitor import GradientMonitor
    from etude.callbacks.learning_rate_monitor import LearningRateMonitor
    from etude.callbacks.lr_schedule import LRSchedule
    from etude.callbacks.model_checkpoint import ModelCheckpoint
    from etude.callbacks.nan_debugger import NaNDebugger
    from etude.callbacks.profiler import Profiler
    from etude.callbacks.progress import ProgressDisplay
    from etude.callbacks.recorder import RunRecorder
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
    "DeviceStats",
    "EarlyStopping",
    "EventCallback",
    "Freeze",
    "GradientHealth",
    "GradientMonitor",
    "LRSchedule",
    "LearningRateMonitor",
    "MLflowLogger",
    "ModelCheckpoint",
    "NaNDebugger",
    "OpenTelemetryLogger",
    "Profiler",
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
]

__getattr__ = load_late(__name__, __file__)
