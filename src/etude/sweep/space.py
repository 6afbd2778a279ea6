"""The search space for optuna: distributions, points of a grid, and values back from optuna's parameters."""

import importlib.util
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from optuna import Study, Trial
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from etude.config import Selection, build_selection, lookup
from etude.core.errors import ConfigError
from etude.sweep.search import NEEDS, GridSearch
from etude.sweep.spec import Range, SweepSpec, text_of


def distribution(values: Range | list[Any]) -> BaseDistribution:
    """Return the distribution of a key of the space."""
    if isinstance(values, list):
        return CategoricalDistribution(labels_of(values))
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), values.log, int(values.step or 1))
    return FloatDistribution(float(values.low), float(values.high), values.log, values.step)


def values_of(spec: SweepSpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a trial by config key."""
    found = {}
    for key, values in spec.space.items():
        param = params[key]
        found[key] = values[labels_of(values).index(param)] if isinstance(values, list) else param
    return found


def ask(study: Study, spec: SweepSpec) -> Trial:
    """Return a new trial. The caller holds the lock of the sweep, so its number is known.

    The sampler gets a seed for every trial: a continued sweep goes on as if it had not been stopped, and several
    processes do not repeat each other's choices.
    """
    with _sampling(study, spec, len(study.get_trials(deepcopy=False))):
        return study.ask({key: distribution(values) for key, values in spec.space.items()})


def continued(study: Study, spec: SweepSpec, left: FrozenTrial) -> Trial:
    """Return a trial of another process, with all its values: that process may have been killed while it chose them."""
    trial = Trial(study, left._trial_id)
    with _sampling(study, spec, left.number):
        for key in (key for key in spec.space if key not in left.params):
            trial._suggest(key, distribution(spec.space[key]))
    return trial


@contextmanager
def _sampling(study: Study, spec: SweepSpec, number: int) -> Iterator[None]:
    """Give a study the sampler of the trial with this number; what it cannot do becomes a ConfigError."""
    seed = random.Random(f"{spec.seed}/{number}").getrandbits(32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of experimental arguments, and of steps that do not end at `high`
        study.sampler = sampler = _built(spec.sampler, "sampler", "grid" if spec.is_grid else "tpe", seed=seed)
        if isinstance(sampler, GridSearch):
            sampler.labels = {key: labels_of(one) for key, one in spec.space.items() if isinstance(one, list)}
        try:
            yield
        except (ValueError, TypeError, ArithmeticError, ImportError) as error:  # arguments that it did not check
            raise ConfigError(f"sampler: optuna cannot choose a trial: {type(error).__name__}: {error}") from error


def pruner_of(spec: SweepSpec) -> BasePruner:
    """Return the pruner of a sweep, and check that its sampler can be built."""
    name = spec.sampler.component.name if spec.sampler is not None else "tpe"
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        raise ConfigError(f"sampler '{name}' needs {NEEDS[name]}: pip install {NEEDS[name]}")
    if name == "cmaes" and not any(isinstance(values, Range) for values in spec.space.values()):
        raise ConfigError("sampler 'cmaes' searches ranges, and chooses from lists at random; use tpe or gp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        _built(spec.sampler, "sampler", "tpe", seed=0)
        pruner: BasePruner = _built(spec.pruner, "pruner", "none")
        return pruner


def _built(selection: Selection | None, kind: str, default: str, **provided: Any) -> Any:
    return build_selection(selection or Selection(lookup(kind, default)), path=kind, provided=provided)


def labels_of(values: list[Any]) -> list[Any]:
    """Return choices for optuna, which knows single values only and finds them by equality: 1 is true for it."""
    plain = all(one is None or isinstance(one, (str, int, float)) for one in values)
    return values if plain and len(set(values)) == len(values) else [text_of(one) for one in values]
