"""Samplers and pruners by name: optuna's classes, whose arguments are the keys of their sections."""

import math
from typing import Any

import optuna
from optuna import pruners, samplers

from etude.config import register


@register("sampler", "grid", provided=("seed",))
class GridSearch(samplers.RandomSampler):
    """Every combination of the listed values, in order."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.labels: dict[str, list[Any]] = {}
        """The values of every key; those of the last key change first."""

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:  # noqa: ARG002
        """Return the value by the number of the trial, which no other process has, on whatever machine.

        >>> grid = GridSearch()
        >>> grid.labels = {"a": [1, 2], "b": ["x", "y"]}
        >>> study = optuna.create_study(sampler=grid)
        >>> lists = {key: optuna.distributions.CategoricalDistribution(one) for key, one in grid.labels.items()}
        >>> [[*study.ask(lists).params.values()] for _ in range(4)]
        [[1, 'x'], [1, 'y'], [2, 'x'], [2, 'y']]
        """
        later = [*self.labels][1 + [*self.labels].index(param_name) :]
        own, place = self.labels[param_name], trial.number // math.prod(len(self.labels[key]) for key in later)
        return own[place % len(own)]


SAMPLERS: dict[str, Any] = {
    "tpe": samplers.TPESampler,
    "random": samplers.RandomSampler,
    "cmaes": samplers.CmaEsSampler,
    "gp": samplers.GPSampler,
}
PRUNERS: dict[str, Any] = {
    "median": pruners.MedianPruner,
    "percentile": pruners.PercentilePruner,
    "hyperband": pruners.HyperbandPruner,
    "successive_halving": pruners.SuccessiveHalvingPruner,
    "threshold": pruners.ThresholdPruner,
    "none": pruners.NopPruner,
}
NEEDS = {"cmaes": "cmaes", "gp": "scipy"}
"""Sampler → package that optuna imports for it."""

for _name, _sampler in SAMPLERS.items():
    register("sampler", _name, provided=("seed",))(_sampler)
for _name, _pruner in PRUNERS.items():
    register("pruner", _name)(_pruner)
optuna.logging.set_verbosity(optuna.logging.ERROR)  # the sweep prints its trials itself
