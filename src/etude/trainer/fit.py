"""Finding the sizes of batches that fit into the device's memory, by steps that are undone."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from etude.config.read import read_config
from etude.core import Clock, ConfigError, Loader, TrainingError
from etude.core.batch import num_samples
from etude.core.division import divide
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
    trials = _Trials(config, step, machine, model)
    size = config.batch_size
    words = []
    if size == "auto":
        size = trials.batch_size(train)
        most = "" if machine.device.type == "cuda" else f" (at most {MOST_ON_CPU} on the CPU)"
        words.append(f"batch_size is {size}, the largest power of two that fits{most}")
    micro = config.micro_batch_size
    if micro == "auto":
        micro, batch = trials.micro_batch_size(train, size)
        words.append(f"micro_batch_size is {micro}: batches of {batch} run in {-(-batch // micro)} parts")
    return config.model_copy(update=_numbers(config, size, micro, step)), "; ".join(words)


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


class _Trials:
    """Tries steps on this rank's share of batches, and says whether they fit on all ranks."""

    def __init__(self, config: TrainerConfig, step: Step, machine: Machine, model: nn.Module) -> None:
        self._config, self._machine, self._model = config, machine, model
        self._step = Step(model, step.task, step.updater, machine.precision, metrics=step.metrics)
        parts = (
            model,
            step.updater.optimizer,
            machine.precision,
            Clock(),
            StepLog(machine.data_world),
            CallbackList(()),
        )
        self._state = TrainState(*parts, machine.world, config.seed, step.task)

    def batch_size(self, train: Any) -> int:
        """Return the largest power of two that fits; raise ConfigError if the data comes in batches already."""
        world = self._machine.data_world.size
        whole = None if isinstance(train, Loader) else self._loader(train, world)
        if not isinstance(whole, DataLoader):
            raise ConfigError(
                "training.batch_size is auto, but the given loader makes its own batches; pass the data itself, or "
                "set a number"
            )
        most = whole.epoch_samples
        if self._machine.device.type != "cuda":
            most = min(most, MOST_ON_CPU)
        return largest_power(lambda size: self._fit(self._first(self._loader(train, size))), most, world)

    def micro_batch_size(self, train: Any, size: int | dict[int, int]) -> tuple[int, int]:
        """Return the size of the fewest parts that fit, and that of the batches that are divided into them."""
        if isinstance(train, Iterator):
            raise ConfigError("training.micro_batch_size is auto, but the data can be read only once; set a number")
        epoch = max(size, key=size.__getitem__) if isinstance(size, dict) else 0
        first, world = self._first(self._loader(train, size), epoch), self._machine.data_world
        batch = world.host_max([num_samples(first)])[0]  # shares of ranks may differ by one
        parts = fewest_parts(lambda size: self._fit(divide(first, -(-batch // size))[0]), batch)
        return -(-batch // parts) * world.size, batch * world.size

    def _loader(self, train: Any, size: int | dict[int, int]) -> Loader:
        """Return the training loader, with batches of this size if it makes them itself."""
        config = self._config.model_copy(update={"batch_size": size, "num_workers": 0, "drop_last": False})
        return Loaders(config=config, machine=self._machine, model=self._model).make(train, training=True)

    def _first(self, loader: Loader, epoch: int = 0) -> Any:
        batches = loader.iterate(epoch)
        try:
            return next(iter(batches))
        finally:
            batches.close()

    def _fit(self, batch: Any) -> bool:
        with self._machine.current():
            fitted = self._run(batch)
            if self._machine.device.type == "cuda":
                torch.cuda.empty_cache()
        return not self._machine.data_world.host_max([int(not fitted)])[0]

    def _run(self, batch: Any) -> bool:
        with trial(self._state, self._step) as run:
            try:
                for _ in range(_STEPS):
                    run([batch])
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return False
        return True
