"""The learning rates and other scheduled settings of an experiment, step by step, without training."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from etude.config import Selection
from etude.config.selection import selections_in
from etude.core import ConfigError
from etude.distributed import World
from etude.engine.learning_rate import LearningRate
from etude.engine.update import Updater
from etude.experiment.build import build_data
from etude.experiment.check import check_experiment
from etude.experiment.config import ExperimentConfig
from etude.monitor.series import Series
from etude.optim import Schedules
from etude.trainer import TrainerConfig
from etude.trainer.loaders import steps_per_any_epoch, total_steps
from etude.trainer.schedule import PlannedSchedule

MOST_POINTS = 2000


def schedule_curves(config: ExperimentConfig) -> tuple[list[Series], bool]:
    """Return the rate of every parameter group, and other scheduled settings, over the steps of a run.

    The model has no memory for its weights. The data is built only if the length of the run, or of an epoch that a
    schedule counts in, depends on it. The second value tells whether rates also depend on metrics (`plateau`), which
    the curves leave out.
    """
    (optimizer, _), scheduler = check_experiment(config), config.selection("scheduler")
    total, per_epoch = _lengths(config, scheduler)
    schedule = None if scheduler is None else PlannedSchedule(scheduler, config.document).for_plan(total, per_epoch)
    rate, updater = LearningRate(optimizer, schedule), Updater(optimizer)
    steps = np.unique(np.linspace(0, total - 1, min(total, MOST_POINTS)).round().astype(int))
    found: dict[str, list[float]] = {}
    for step in steps.tolist():
        rate.set(step)
        for name, value in (updater.rates() | rate.others()).items():
            found.setdefault(name, []).append(value)
    curves = [Series(name, steps.astype(float), np.array(values)) for name, values in found.items()]
    return curves, schedule is not None and bool(Schedules.of(schedule).callbacks)


def _lengths(config: ExperimentConfig, scheduler: Selection | None) -> tuple[int, int | None]:
    """Return the steps of the run, and of an epoch if they are needed or known."""
    training: TrainerConfig = config.sections["training"]
    if training.num_epochs is None and training.max_steps is not None and "epoch" not in _units(scheduler):
        return training.max_steps, None
    loader = build_data(config, World()).loader("train")
    if (total := total_steps(training, loader)) is None:
        raise ConfigError("the length of the run is unknown: the data has no length; set training.max_steps")
    return total, steps_per_any_epoch(training, loader)


def _units(scheduler: Selection | None) -> Iterator[Any]:
    """Yield the units in which schedules count."""
    for one in selections_in(scheduler).values():
        yield one.arguments.get("unit")
