"""Finding a learning rate for an experiment, without a run folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config.selection import plain
from etude.core import ConfigError
from etude.distributed import before_joining
from etude.experiment.build import build_data, build_trainer
from etude.experiment.config import ExperimentConfig, load_experiment_config
from etude.experiment.opened import joined_world
from etude.trainer.find_lr import RateSearch

_RATES = ("lr", "learning_rate", "adamw_lr")
"""Names of learning rates; the second one in parameter groups, the third one in Muon."""


@dataclass(frozen=True, slots=True)
class FoundRate:
    """The result of a range test of an experiment."""

    search: RateSearch
    overrides: list[str]
    """The settings that make `etude train` use the suggestion; empty if there is none."""
    name: str = ""


def find_lr(
    experiment: str | Path | ExperimentConfig,
    overrides: Sequence[str] = (),
    *,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    steps: int = 100,
) -> FoundRate:
    """Test learning rates on the data of an experiment; nothing is written. See `Trainer.find_lr`."""
    with before_joining():
        config = (
            experiment
            if isinstance(experiment, ExperimentConfig)
            else load_experiment_config(experiment, overrides=overrides)
        )
    with joined_world(config.training.device) as world:
        data = build_data(config, world)
        if data.splits.train is None:
            raise ConfigError(f"{data.place}: there is no train split to try learning rates on")
        trainer = build_trainer(config, data=data, world=world, progress=False)
        search = trainer.find_lr(min_lr, max_lr, steps)
    section = config.selection("optimizer")
    said = {"lr": search.base} if section is None else plain(section)
    factor = None if search.suggestion is None else search.suggestion / search.base
    rates = [] if factor is None else [f"{key}={rate * factor:.3g}" for key, rate in _rates(said, "optimizer")]
    return FoundRate(search, rates, config.name)


def _rates(section: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield every learning rate of a section: that of all parameters, those of groups or of several optimizers."""
    items = (
        section.items() if isinstance(section, Mapping) else enumerate(section) if isinstance(section, list) else ()
    )
    for key, value in items:
        if key in _RATES and isinstance(value, int | float):
            yield f"{path}.{key}", float(value)
        else:
            yield from _rates(value, f"{path}.{key}")
