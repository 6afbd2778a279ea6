"""Arguments of a `Trainer`: names and mappings become objects, and unusable values are refused in one line."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from etude.callbacks import EMA, Freeze
from etude.config import build_component
from etude.config.schema import validate_section
from etude.config.selection import plain
from etude.config.shapes import canonical_keys
from etude.core import ConfigError, Task
from etude.core.arguments import as_whole
from etude.core.spelling import did_you_mean
from etude.core.task import Measures, as_task
from etude.distributed.settings import SHORT, ParallelConfig
from etude.engine.callback import Callback
from etude.engine.callback_list import CallbackList
from etude.lazy import import_room
from etude.losses import LossStrategy, SupervisedTask, as_strategy
from etude.metrics.metric_set import MetricLike, MetricSet
from etude.trainer.config import TRAINING_ALIASES, AverageSettings, TrainerConfig

_MODALITIES = "etude.multimodal"
_TASKS = "etude.multitask"

Section = str | Mapping[str, Any]
"""A registered component as in a config file: its name, or a mapping with `name` and arguments."""
ConfigLike = TrainerConfig | Mapping[str, Any] | None
LossLike = LossStrategy | nn.Module | Callable[..., Any] | Section | None
MetricsLike = MetricLike | Measures | Iterable[MetricLike] | Mapping[str, MetricLike] | None
CallbacksLike = Callback | Section | Iterable[Callback | Section]


def expect(argument: str, value: Any, fits: bool, wanted: str) -> None:
    """Raise ConfigError unless an argument fits; a class passed instead of an instance is reported as such."""
    if isinstance(value, type):
        raise ConfigError(f"{argument} is the class {value.__name__}; pass an instance: {value.__name__}(…)")
    if not fits:
        found = "None" if value is None else f"{type(value).__name__} {value!r:.60}".replace("\n", " ")
        raise ConfigError(f"{argument} must be {wanted}, found {found}")


def check_model(model: Any) -> nn.Module:
    """Return the model; raise ConfigError if it is not a module."""
    expect("model", model, isinstance(model, nn.Module), "a torch.nn.Module")
    return model  # type: ignore[no-any-return]


def as_config(
    config: ConfigLike,
    *,
    device: str | torch.device | None,
    use_amp: bool | None,
    compile_model: bool | None,
) -> TrainerConfig:
    """Return the config as a `TrainerConfig`, updated by other arguments of the `Trainer`."""
    fits = config is None or isinstance(config, (TrainerConfig, Mapping))
    expect("config", config, fits, "a TrainerConfig (`load_config(path).training` is one) or a mapping of its keys")
    if not isinstance(config, TrainerConfig):
        data = canonical_keys(dict(config or {}), TRAINING_ALIASES, "training", None)
        config = validate_section(TrainerConfig, data, path="training", document=None)
    for name, value in (("use_amp", use_amp), ("compile_model", compile_model)):
        expect(name, value, isinstance(value, bool | None), "True, False or None")
    changes: dict[str, Any] = {}
    if device is not None:
        changes["device"] = str(device)
    if compile_model is not None:
        changes["compile"] = "step" if compile_model else "off"
    if use_amp is not None:
        changes["use_mixed_precision"] = use_amp
        if use_amp and config.precision_dtype is None and config.precision in ("bf16", "fp16"):
            changes["precision_dtype"] = config.precision
    return config.model_copy(update=changes)


def as_parallel(parallel: Any) -> ParallelConfig:
    """Return the argument `parallel` of a `Trainer` as a `ParallelConfig`."""
    if isinstance(parallel, ParallelConfig):
        return parallel
    expect("parallel", parallel, isinstance(parallel, Mapping | str | None), "a mapping, ddp, fsdp or auto")
    data = SHORT.get(parallel, {"shard": parallel}) if isinstance(parallel, str) else dict(parallel or {})
    return validate_section(ParallelConfig, data, path="parallel", document=None)


def check_divided(config: TrainerConfig, callbacks: CallbackList) -> None:
    """Raise ConfigError for what a model that processes divide does not support."""
    why = "which processes that divide the model do not have; remove it, or use parallel: ddp"
    for one in callbacks:
        if one in callbacks.watchers():
            raise ConfigError(f"{type(one).__name__} reads the gradients of whole layers, {why}")
        if one.runs_alone:
            raise ConfigError(f"{type(one).__name__} runs the whole model on one process, {why}")
    for name in ("batch_size", "micro_batch_size"):
        if getattr(config, name) == "auto":
            raise ConfigError(
                f"training.{name} is auto, which a model that processes divide does not support; set it"
            )
    if config.on_out_of_memory == "split":
        raise ConfigError(
            "training.on_out_of_memory is split, which a model that processes divide does not support; set it to error"
        )


def as_loss(loss: Any) -> Any:
    """Return a loss; a name is built into one."""
    if loss is None or isinstance(loss, LossStrategy):
        return loss
    if isinstance(loss, (str, Mapping)):
        return build_named("loss", loss, "loss")
    expect("loss", loss, callable(loss), "a torch loss, a function of (predictions, labels) or a name")
    return loss


def make_task(loss: Any, task: Any, config: TrainerConfig, modalities: Mapping[str, Any], *, of: type) -> Task:
    """Return the task of a trainer: the one given, that of a loss, or that of tokens of several modalities.

    `etude.multimodal` is imported only if needed. Raises ConfigError for contradictory arguments, and TypeError for a
    keyword argument that the class `of` does not have.
    """
    if not modalities and config.meaningful_loss is None:
        return plain_task(loss, task)
    for name in modalities:
        if name in TrainerConfig.model_fields:
            raise TypeError(f"{of.__name__}() has no argument '{name}'; it is a setting: pass config={{'{name}': …}}")
    room = _room_for(of, modalities)
    made: Task = room.make_task(loss, task, config.meaningful_loss, modalities, of)
    return made


def _room_for(of: type, modalities: Mapping[str, Any]) -> Any:
    """Return the module that makes the task of several modalities; the error says what is not installed."""
    if (room := import_room(f"{_MODALITIES}.training")) is not None:
        return room
    missing = f"{_MODALITIES}, which is not installed"
    if not modalities:
        raise ConfigError(f"config.meaningful_loss needs {missing}")
    name = next(iter(modalities))
    near = did_you_mean(name, inspect.signature(of).parameters)
    hint = near or f"; arguments for several modalities need {missing}"
    raise TypeError(f"{of.__name__}() has no argument '{name}'{hint}")


def plain_task(loss: Any, task: Any, name: str = "loss") -> Task:
    """Return the given task, or that of a loss; `name` is the name of the loss argument."""
    if loss is not None and task is not None:
        raise ConfigError(f"{name}= and task= both define the objective; keep one of them")
    return as_task(task) if task is not None else SupervisedTask(as_strategy(as_loss(loss)))


def measure(task: Task, metrics: Any, in_training: bool | list[str] | None, *, validates: bool) -> None:
    """Let a task measure metrics in validation and, if wanted or if nothing is validated, in training."""
    if in_training is None:
        in_training = not validates
    if not isinstance(metrics, Measures):
        metrics = MetricSet.of(metrics, in_training)
    elif isinstance(in_training, list):
        raise ConfigError("all metrics are measured in training here; remove train_metrics")
    if metrics.wants(training=True) or metrics.wants(training=False):
        task.measure(metrics)
    elif task.measures.wants(training=False):  # those of an earlier trainer of the same task
        task.measure(Measures())


def as_callbacks(callbacks: Any, curriculum: Any = None, config: TrainerConfig | None = None) -> list[Callback]:
    """Return a list of callbacks from a list or a single one; names are built into callbacks.

    Settings of the config that are callbacks come first, then that of a curriculum.

    >>> [type(one).__name__ for one in as_callbacks({"name": "early_stopping", "patience": 2})]
    ['EarlyStopping']
    """
    first = [] if config is None else _configured(config)
    if curriculum is not None:
        if (room := import_room(f"{_TASKS}.curriculum.callback")) is None:
            raise ConfigError(f"curriculum= needs {_TASKS}, which is not installed")
        first.append(room.CurriculumCallback(curriculum))
    if callbacks is None:
        return first
    if isinstance(callbacks, (Callback, str, Mapping)) or not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    return first + [_as_callback(one, place) for place, one in enumerate(callbacks)]


def _configured(config: TrainerConfig) -> list[Callback]:
    """Return the callbacks that settings of `training` stand for."""
    found: list[Callback] = []
    if config.freeze:
        found.append(Freeze(config.freeze, config.unfreeze, config.frozen_eval))
    if config.ema is not None:
        average = config.ema if isinstance(config.ema, AverageSettings) else AverageSettings(decay=config.ema)
        found.append(EMA(average.decay, average.start, average.every, average.validate_average))
    return found


def _as_callback(callback: Any, place: int) -> Callback:
    if isinstance(callback, (str, Mapping)):
        callback = build_named("callback", callback, f"callbacks.{place}")
    expect("callbacks", callback, isinstance(callback, Callback), "of class etude.Callback or names of such")
    return callback  # type: ignore[no-any-return]


def check_functions(**functions: Any) -> None:
    """Raise ConfigError for a function that cannot be called."""
    for name, function in functions.items():
        expect(name, function, callable(function), "a function")


def check_judge(config: TrainerConfig, *, has_validation: bool) -> None:
    """Raise ConfigError if the monitored metric is one of a validation that there is not."""
    given = config.changed(("monitor", "restore_best"))
    name = config.judge().name
    if given and name.startswith("val_") and not has_validation:
        raise ConfigError(
            f"training.{given[0]} needs '{name}', but there is no validation data; pass some, or set training.monitor "
            "to a metric of training such as 'loss'"
        )


def as_epochs(num_epochs: Any) -> int:
    """Return a number of epochs; raise ConfigError unless it is an integer of at least 1."""
    return as_whole("num_epochs", num_epochs, least=1)


def build_named(kind: str, section: Section, path: str, **provided: Any) -> Any:
    """Return the registered component that a section names."""
    return build_component(kind, section, path=path, provided=provided)


def shared_settings(config: TrainerConfig) -> dict[str, Any]:
    """Return the settings that must be the same in all processes: those that change results or collectives.

    >>> shared_settings(TrainerConfig(seed=3))["training.seed"]
    3
    """
    own = {"device", "num_threads", "num_workers", "pin_memory", "persistent_workers", "prefetch", "prefetch_factor"}
    return {f"training.{name}": value for name, value in plain(config).items() if name not in own}
