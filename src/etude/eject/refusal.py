"""What an ejected file can contain: everything else is refused with its key, before anything is built."""

from collections.abc import Callable, Mapping
from typing import Any

from etude.core import ConfigError
from etude.distributed.settings import ParallelConfig
from etude.experiment import ExperimentConfig

SECTIONS = (
    "name",
    "description",
    "imports",
    "model",
    "data",
    "loss",
    "optimizer",
    "scheduler",
    "training",
    "parallel",
    "callbacks",
)
WRITTEN = frozenset(
    {
        *("epochs", "max_steps", "batch_size", "seed", "grad_accum_steps", "drop_last"),
        *("log_interval", "validate_interval", "validate_every_steps"),
        *("gradient_clip_norm", "gradient_clip_value", "precision", "use_mixed_precision", "precision_dtype"),
        *("device", "deterministic", "num_threads", "compile", "capture"),
    }
)
"""Keys of `training` that the file contains, or that `_VALUES` limits."""
IDLE = frozenset(
    {
        *("sanity_val_batches", "train_metrics", "max_skipped_steps", "loss_scale", "find_unused_parameters"),
        "collective_timeout_s",
        *(
            "save_checkpoints",
            "checkpoint_dir",
            "checkpoint_interval",
            "save_every_steps",
            "async_save",
            "keep_best",
            "trainable_only",
            "monitor",
            "mode",
        ),
        *("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "prefetch"),
    }
)
"""Keys of `training` that do not change the weights: they are left out."""
WATCHING = (
    *(
        "csv_logger",
        "gradient_monitor",
        "model_checkpoint",
        "nan_debugger",
        "device_stats",
        "learning_rate_monitor",
        "profiler",
        "text_samples",
    ),
    *("mlflow", "opentelemetry", "prometheus", "tensorboard", "trackio", "wandb"),
)
"""Callbacks that do not change training: they are left out."""
DATA = "only mnist, tables, arrays and blocks of tokens can be written"
LOSSES = ("cross_entropy", "text_classification", "vision_classification", "language_modeling", "mse", "l1", "huber")
OTHER_DATA = ("huggingface", "image_folder", "jsonl", "streams", "token_mixture")
"""Data sets whose samples are made during training; those of the user are looked at when they are built."""
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "device": (lambda value: value in ("auto", "cpu"), "only runs on the CPU have the same bits; set it to cpu"),
    "compile": (lambda value: value in ("auto", "off"), "compiled code is not plain PyTorch; set it to off"),
    "capture": (lambda value: value in ("auto", "off"), "CUDA graphs are not plain PyTorch; set it to off"),
    "batch_size": (lambda value: isinstance(value, int), "only one number can be written; set one"),
    "grad_accum_steps": (lambda value: isinstance(value, int), "a schedule cannot be written; set one number"),
}
"""Key of `training` → which values can be written, and why others cannot."""


def refuse(config: ExperimentConfig, key: str, reason: str) -> ConfigError:
    """Return the error for a key of a config that cannot be written as plain PyTorch."""
    return ConfigError(f"{config.document.place(key)}: cannot be ejected: {reason}")


def check_config(config: ExperimentConfig) -> None:
    """Raise ConfigError, with the key, for the first setting that an ejected file cannot contain."""
    for key, value in config.sections.items():
        if key not in SECTIONS and value not in (None, [], {}):
            raise refuse(config, key, "plain PyTorch has nothing for it; remove it")
    if config.sections["parallel"] != ParallelConfig():
        raise refuse(config, "parallel", "the file trains with one process; remove it")
    _check_components(config)
    training = config.sections["training"]
    for key in training.changed(type(training).model_fields):
        value = getattr(training, key)
        is_plain, reason = _VALUES.get(key, (lambda _: True, ""))
        if key not in WRITTEN | IDLE:
            raise refuse(config, f"training.{key}", "it changes training in a way that is not written; remove it")
        if not is_plain(value):
            raise refuse(config, f"training.{key}", f"it is {value!r}, and {reason}")
    if training.resolved_precision == "fp16":
        raise refuse(config, "training.precision", "fp16 needs a loss scale; use fp32 or bf16")
    for place, callback in enumerate(config.sections.get("callbacks") or []):
        if callback.component.name not in WATCHING:
            key, name = f"callbacks.{place}", callback.component.name
            raise refuse(config, key, f"the callback '{name}' may change training; remove it")


def _check_components(config: ExperimentConfig) -> None:
    """Refuse losses and data sets by name, before data is downloaded or made."""
    loss, data = config.selection("loss"), config.selection("data")
    if loss is not None and loss.component.name not in LOSSES:
        raise refuse(config, "loss.name", f"'{loss.component.name}' is not one of {', '.join(LOSSES)}")
    if data is None:
        return
    if data.component.name in OTHER_DATA:
        raise refuse(config, "data.name", f"{DATA}, not '{data.component.name}'")
    given = data.defaults | data.arguments
    reads_tokens = data.component.name in ("tokens", "text_corpus")
    for key, plain in (("read", "blocks"), ("mask_rate", 0.0)) if reads_tokens else ():
        if given[key] != plain:
            raise refuse(config, f"data.{key}", f"{DATA}; set it to {plain}")
