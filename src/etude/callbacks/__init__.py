"""Built-in callbacks; the protocol itself is in `etude.engine.callback`."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.callbacks.csv_logger import CSVLogger as CSVLogger
    from etude.callbacks.device_stats import DeviceStats as DeviceStats
    from etude.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from etude.callbacks.ema import EMA as EMA
    from etude.callbacks.events import EventCallback as EventCallback, Telemetry as Telemetry
    from etude.callbacks.freeze import Freeze as Freeze
    from etude.callbacks.gradient_health import GradientHealth as GradientHealth
    from etude.callbacks.gradient_monitor import GradientMonitor as GradientMonitor
    from etude.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from etude.callbacks.lr_schedule import LRSchedule as LRSchedule
    from etude.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from etude.callbacks.nan_debugger import NaNDebugger as NaNDebugger
    from etude.callbacks.profiler import Profiler as Profiler
    from etude.callbacks.progress import ProgressDisplay as ProgressDisplay
    from etude.callbacks.recorder import RunRecorder as RunRecorder
    from etude.callbacks.reduce_on_plateau import plateau as plateau
    from etude.callbacks.sinks.base import SinkCallback as SinkCallback
    from etude.callbacks.sinks.mlflow import MLflowLogger as MLflowLogger
    from etude.callbacks.sinks.opentelemetry import OpenTelemetryLogger as OpenTelemetryLogger
    from etude.callbacks.sinks.prometheus import PrometheusExporter as PrometheusExporter
    from etude.callbacks.sinks.tensorboard import TensorBoardLogger as TensorBoardLogger
    from etude.callbacks.sinks.trackio import TrackioLogger as TrackioLogger
    from etude.callbacks.sinks.wandb import WandbLogger as WandbLogger
    from etude.callbacks.text_samples import TextSamples as TextSamples
    from etude.engine.callback import Callback as Callback, RunInfo as RunInfo
    from etude.engine.callback_list import CallbackList as CallbackList

__getattr__ = load_late(__name__, __file__)
