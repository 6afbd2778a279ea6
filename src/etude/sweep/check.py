"""Checking a sweep before its first trial: every key and value fits the config of the experiment."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.config import Document
from etude.config.document import COMMAND_LINE
from etude.core.errors import ConfigError
from etude.core.monitor import Mode, mode_of
from etude.experiment import ExperimentConfig, check_experiment, load_experiment_config
from etude.monitor.checkpoint_folder import checkpoint_folder
from etude.sweep.spec import Range, SweepSpec, candidates, overrides_of


def check_sweep(spec: SweepSpec, document: Document) -> ExperimentConfig:
    """Return the config of the experiment with the overrides of the sweep; raise ConfigError for any mistake.

    Ranges with whole ends become ranges of floats where the config holds floats: `model.dropout=0..1` means any number.
    """
    base = _load(spec, {}, document)
    first = spec.first_point()
    for key, values in spec.space.items():
        configs = [_load(spec, {**first, key: value}, document) for value in candidates(values)]
        if isinstance(values, Range) and values.is_whole and _holds_floats(*configs[:2]):
            ends = {"low": float(values.low), "high": float(values.high)}
            spec.space[key] = values.model_copy(update=ends)
    check_experiment(configs[-1])
    folder = base.training.checkpoint_dir
    if len({checkpoint_folder(Path(run), folder).resolve() for run in ("one", "other")}) == 1:
        raise ConfigError(
            f"training.checkpoint_dir is {folder}, where only one run can save; set a relative path, which is inside "
            "the folder of each trial, or null"
        )
    return base


def _holds_floats(one: ExperimentConfig, other: ExperimentConfig) -> bool:
    """Whether a number in which two configs differ is a float, which the schema makes of a whole number.

    The difference is looked for because a key may have other names than the config's own.
    """
    return any(isinstance(value, float) for value in _differing(one.to_dict(), other.to_dict()))


def _differing(one: Any, other: Any) -> Iterator[Any]:
    """Yield the values of the first that the second has differently."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            yield from _differing(one[key], other[key])
    elif isinstance(one, list) and isinstance(other, list):
        for mine, theirs in zip(one, other, strict=False):
            yield from _differing(mine, theirs)
    elif one != other:
        yield one


def judged_by(spec: SweepSpec, config: ExperimentConfig, document: Document) -> tuple[str, Mode]:
    """Return the metric of a sweep, and whether its smallest or largest value is the best."""
    judge = config.training.judge()
    if spec.metric in (None, judge.name) and spec.mode is None:
        return judge.name, judge.mode
    metric = spec.metric or judge.name
    return metric, mode_of(metric, spec.mode, document.place("metric"))


def _load(spec: SweepSpec, point: Mapping[str, Any], document: Document) -> ExperimentConfig:
    """Load the experiment with one point of the space; a mistake names its place in the sweep file."""
    try:
        return load_experiment_config(spec.experiment, overrides=overrides_of({**spec.overrides, **point}))
    except ConfigError as error:
        lines = str(error).splitlines()
        for section, keys in (("space", point), ("overrides", spec.overrides)):
            for key in keys:
                place = document.place(f"{section}.{key}").replace(f"{COMMAND_LINE}: {section}.", f"{COMMAND_LINE}: ")
                begin = f"{COMMAND_LINE}: {key}"
                lines = [
                    place + line[len(begin) :] if line.startswith((f"{begin}:", f"{begin}.")) else line
                    for line in lines
                ]
        raise ConfigError("\n".join(lines)) from None
