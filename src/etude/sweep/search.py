"""Samplers and pruners by name: optuna's classes, whose arguments are the keys of their sections."""

from typing import Any

import optuna
from optuna import pruners, samplers

from etude.config import register


@register("sampler", "grid", provided=("seed",))
class GridSearch(samplers.RandomSampler):
    """Every combination of the listed values, in order."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)


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
