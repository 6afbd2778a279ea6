"""Pictures of a sweep: its history, which settings matter, and every trial as a line through its settings."""

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from etude.core.errors import ConfigError
from etude.monitor.columns import Array
from etude.monitor.series import Series
from etude.sweep.spec import Range, SweepSpec

if TYPE_CHECKING:
    from optuna import Study

FORMATS = (".png", ".svg", ".pdf")


def complete_trials(study: "Study") -> list[FrozenTrial]:
    """Return the trials that have a value; raise ConfigError if there are none yet."""
    if not (found := study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))):
        raise ConfigError("no trial of this sweep is complete yet")
    return found


def history(study: "Study", spec: SweepSpec) -> list[Series]:
    """Return the value of every complete trial, and the best so far."""
    trials = complete_trials(study)
    numbers = np.array([trial.number for trial in trials], dtype=np.float64)
    values = np.array([trial.value for trial in trials], dtype=np.float64)
    best = (np.minimum if spec.mode == "min" else np.maximum).accumulate(values)
    return [Series(str(spec.metric), numbers, values), Series(str(spec.metric), numbers, best)]


def importance(study: "Study") -> dict[str, float]:
    """Return the share of each setting in the differences between trials (PED-ANOVA), the largest first.

    Empty with fewer than four complete trials, or if all have the same value.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    trials = complete_trials(study)
    if len(trials) < 4 or len({trial.value for trial in trials}) == 1:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: share for name, share in found.items() if math.isfinite(share)}


def bars(shares: dict[str, float], width: int = 40) -> list[str]:
    """Return shares as lines of text.

    >>> bars({"optimizer.lr": 0.75, "model.dropout": 0.25}, width=8)
    ['optimizer.lr   ######   75 %', 'model.dropout  ##       25 %']
    """
    longest = max(map(len, shares), default=0)
    return [
        f"{name:<{longest}}  {'#' * round(one * width):<{width}} {one:.0%}"[:-1] + " %"
        for name, one in shares.items()
    ]


def save_pictures(study: "Study", spec: SweepSpec, out: Path) -> None:
    """Write history, importance and parallel coordinates to one file; raise ConfigError if that cannot be done."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out}: the name must end in {', '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--out needs matplotlib: pip install 'etude[plot]'") from error
    values, best = history(study, spec)
    figure = Figure(figsize=(10, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[3, max(1, len(spec.space) / 3), 4])
    top.plot(values.x, values.y, ".", label="trial")
    top.step(best.x, best.y, where="post", label="best so far")
    top.set(xlabel="trial", ylabel=spec.metric)
    top.legend()
    shares = importance(study)
    middle.barh([*shares][::-1], [*shares.values()][::-1])
    middle.set(xlabel="importance", xlim=(0, 1))
    _parallel(figure, bottom, study, spec)
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def _parallel(figure: Any, axes: Any, study: "Study", spec: SweepSpec) -> None:
    """Draw every trial as a line through its settings, coloured by its value."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    trials = complete_trials(study)
    values = [float(trial.value or 0.0) for trial in trials]
    scale = ScalarMappable(
        Normalize(min(values), max(values)), colormaps["viridis" if spec.mode == "max" else "viridis_r"]
    )
    places = np.stack([_places(one, [trial.params[key] for trial in trials]) for key, one in spec.space.items()])
    for column, value in zip(places.T, values, strict=True):
        axes.plot(column, color=scale.to_rgba(value), alpha=0.7)
    for place, one in enumerate(spec.space.values()):
        axes.axvline(place, color="0.7", zorder=0)
        for height, label in _ticks(one):
            axes.text(place, height, f" {label}", fontsize=8, va="center")
    axes.set_xticks(range(len(spec.space)), [*spec.space])
    axes.set_yticks([])
    figure.colorbar(scale, ax=axes, label=spec.metric)


def _places(values: Range | list[Any], params: list[Any]) -> Array:
    """Return where parameters are on their axis, from 0 to 1."""
    if isinstance(values, list):
        from etude.sweep.space import labels_of

        known = labels_of(values)
        return np.array([known.index(one) / max(1, len(known) - 1) for one in params])
    ends, found = np.array([values.low, values.high], dtype=np.float64), np.array(params, dtype=np.float64)
    ends, found = (np.log(ends), np.log(found)) if values.log else (ends, found)
    return np.asarray((found - ends[0]) / (ends[1] - ends[0]))


def _ticks(values: Range | list[Any]) -> list[tuple[float, str]]:
    if isinstance(values, list):
        return [(place / max(1, len(values) - 1), str(one)) for place, one in enumerate(values)]
    return [(0.0, f"{values.low:g}"), (1.0, f"{values.high:g}")]
