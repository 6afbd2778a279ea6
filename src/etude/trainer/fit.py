"""Finding the sizes of batches that fit into the device's memory, by steps that are undone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from etude.config.read import read_config
from etude.core import Clock, ConfigError, Loader, TrainingError
from etude.core.loader import BatchIterator
from etude.data import DataLoader
from etude.engine.callback_list import CallbackList
from etude.engine.explain import is_out_of_memory
from etude.engine.state import TrainState
from etude.engine.step import Step
from etude.engine.step_log import StepLog
from etude.engine.trial import trial
from etude.monitor import RunFolder
from etude.trainer.config import TrainerConfig
from etude.trainer.loaders import Loaders
from etude.trainer.machine import Machine

FIRST = 32
"""The size that is tried first."""
MOST_ON_CPU = 64
"""Largest `batch_size: auto` on the CPU, whose memory has no limit that could be tried without harm."""
_STEPS = 2
"""Steps per trial: the second one has activations and the optimizer's state in memory at once."""
SIZES = ("batch_size", "micro_batch_size", "on_out_of_memory")


def fit_to_memory(
    config: TrainerConfig, step: Step, train: Any, machine: Machine, model: nn.Module
) -> tuple[TrainerConfig, str]:
    """Return a config with numbers in place of `auto`, and a sentence about them; empty if nothing is auto.

    Every rank tries steps on its share of the batches, without communication, and the size is one that fits on all.
    The model and everything else are as before. Raises ConfigError if the sizes of batches cannot be changed.
    """
    if "auto" not in (config.batch_size, config.micro_batch_size):
        return config, ""
    if train is None:  # only for evaluation
        return config.model_copy(update=_numbers(config, config.first_batch_size or 64, None)), ""
    if isinstance(train, Loader) or not isinstance(_loader(config, machine, model, train, 1), DataLoader):
        raise ConfigError(
            "a size of batches is auto, but the given loader makes its own batches; pass the data itself, or set "
            "training.batch_size and training.micro_batch_size to numbers"
        )
    fits = _trials(config, step, train, machine, model)
    if config.batch_size == "auto":
        samples = _loader(config, machine, model, train, 1).epoch_samples
        most = samples if machine.device.type == "cuda" else min(samples, MOST_ON_CPU)
        size = largest_power(fits, most, machine.world.size)
        words = f"batch_size is {size}, the largest power of two that fits"
        words += "" if machine.device.type == "cuda" else f" (at most {MOST_ON_CPU} on the CPU)"
        return config.model_copy(update=_numbers(config, size, None, step)), words
    batch = config.batch_size if isinstance(config.batch_size, int) else max(config.batch_size.values())
    size = -(-batch // fewest_parts(fits, batch, machine.world.size))
    words = f"micro_batch_size is {size}: batches of {batch} run in {-(-batch // size)} parts"
    return config.model_copy(update=_numbers(config, config.batch_size, size, step)), words


def _numbers(config: TrainerConfig, batch_size: Any, micro: int | None, step: Step | None = None) -> dict[str, Any]:
    recovers = step is not None and step.splitter.recovers
    memory = "split" if recovers else config.on_out_of_memory
    return {"batch_size": batch_size, "micro_batch_size": micro, "on_out_of_memory": memory}


def recorded_sizes(config: TrainerConfig, output_dir: Any, *, resume: bool) -> TrainerConfig:
    """Return a config with the numbers that the run in a folder found for `auto`, if it is resumed."""
    if not resume or "auto" not in (config.batch_size, config.micro_batch_size) or output_dir is None:
        return config
    path = output_dir.config_path if isinstance(output_dir, RunFolder) else RunFolder(Path(output_dir)).config_path
    saved = read_config(path).data.get("training") if path.exists() else None
    if not isinstance(saved, Mapping):
        return config
    return config.model_copy(update={name: saved[name] for name in SIZES if name in saved})


def with_sizes(whole: Mapping[str, Any] | None, config: TrainerConfig) -> Mapping[str, Any] | None:
    """Return the complete config of a run with the numbers that were found."""
    if whole is None or not isinstance(training := whole.get("training"), Mapping):
        return whole
    return {**whole, "training": {**training, **{name: getattr(config, name) for name in SIZES}}}


def largest_power(fits: Callable[[int], bool], most: int, least: int = 1) -> int:
    """Return the largest power of two up to `most` that fits; raise TrainingError if not even `least` does.

    >>> largest_power(lambda size: size <= 100, 1000), largest_power(lambda size: size <= 5, 1000)
    (64, 4)
    """
    size = FIRST
    while size > most:
        size //= 2
    size = max(size, 1)
    if fits(size):
        while size * 2 <= most and fits(size * 2):
            size *= 2
        return size
    while size // 2 >= least:
        size //= 2
        if fits(size):
            return size
    raise _nothing_fits(size)


def fewest_parts(fits: Callable[[int], bool], batch: int, least: int = 1) -> int:
    """Return the smallest number of parts whose size fits: doubled until it does, then by bisection.

    >>> fewest_parts(lambda size: size <= 40, 100), fewest_parts(lambda size: size <= 100, 100)
    (3, 1)
    """
    too_few, parts = 0, 1
    while not fits(-(-batch // parts)):
        if -(-batch // parts) <= least:
            raise _nothing_fits(-(-batch // parts))
        too_few, parts = parts, min(2 * parts, batch)
    while parts - too_few > 1:
        middle = (too_few + parts) // 2
        too_few, parts = (too_few, middle) if fits(-(-batch // middle)) else (middle, parts)
    return parts


def _nothing_fits(size: int) -> TrainingError:
    return TrainingError(
        f"out of memory even with a batch of {size}: use training.activation_checkpointing, a lower precision, a "
        "smaller model or shorter inputs"
    )


def _trials(
    config: TrainerConfig, step: Step, train: Any, machine: Machine, model: nn.Module
) -> Callable[[int], bool]:
    """Return a function that tries batches of a size, over all ranks, and says whether they fit on all of them."""
    alone = Step(model, step.task, step.updater, machine.precision, metrics=step.metrics)
    parts = model, step.updater.optimizer, machine.precision, Clock(), StepLog(machine.world), CallbackList(())
    state = TrainState(*parts, machine.world, config.seed, step.task)

    def fits(size: int) -> bool:
        with machine.current():
            batches: BatchIterator = _loader(config, machine, model, train, size).iterate(0)
            try:
                failed = not _fits(state, alone, next(iter(batches)))
            finally:
                batches.close()
            if machine.device.type == "cuda":
                torch.cuda.empty_cache()
        return not machine.world.host_max([int(failed)])[0]

    return fits


def _fits(state: TrainState, step: Step, batch: Any) -> bool:
    with trial(state, step) as run:
        try:
            for _ in range(_STEPS):
                run([batch])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
    return True


def _loader(config: TrainerConfig, machine: Machine, model: nn.Module, train: Any, size: int) -> Any:
    """Return the training loader with batches of this size."""
    size = max(size, machine.world.size)
    sized = config.model_copy(update={"batch_size": size, "num_workers": 0, "drop_last": False})
    return Loaders(config=sized, machine=machine, model=model).make(train, training=True)
