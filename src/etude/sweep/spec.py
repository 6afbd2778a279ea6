"""What a sweep is: the keys of a sweep file, and the same from words of the command line."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Ge, Gt
from pydantic import Field, model_validator

from etude.config import Document, Section, SectionModel, Selection, dump_yaml, find_config, read_config
from etude.config.dialect import parse_value
from etude.config.document import COMMAND_LINE, Location
from etude.config.overrides import parse_override
from etude.config.read import is_file
from etude.config.schema import validate_section
from etude.config.selection import plain
from etude.core.errors import ConfigError
from etude.core.monitor import Mode

Number = int | float
_RANGE = re.compile(r"\s*([^\s:,\[]+?)\.\.([^\s:,\]]+)(?::(\S+))?\s*")
SPEC = "sweep.yaml"


class Range(SectionModel):
    """Numbers from `low` to `high`, both included; whole numbers if both are, and the config does not want floats."""

    low: Number
    high: Number
    log: bool = False
    """Whether to sample uniformly in the logarithm."""
    step: Annotated[Number, Gt(0)] | None = None
    """Distance between the values that are allowed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, found {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log: true needs a positive low, found {self.low}")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other; remove one")
        length = self.high - self.low
        if self.step is not None and self.step > length and not math.isclose(self.step, length):  # 0.3 - 0.1 < 0.2
            raise ValueError(f"step {self.step} is more than the distance from {self.low} to {self.high}")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the values are integers."""
        return not any(isinstance(one, float) for one in (self.low, self.high, self.step))


class SweepSpec(SectionModel):
    """The keys of a sweep file."""

    experiment: str
    """An experiment, or the path of its file: from the folder of this file, or else from the current one."""
    space: dict[str, Range | list[Any]]
    """Config key → its values: a list, or a range."""
    sampler: Annotated[Any, Section("sampler", frozenset({"seed"}))] | None = None
    """How values are chosen: tpe by default; grid if all keys have lists and no number of trials is given."""
    pruner: Annotated[Any, Section("pruner")] | None = None
    """Which trials are stopped early: none by default."""
    metric: str | None = None
    """What is compared; by default the monitored metric of the experiment."""
    mode: Mode | None = None
    """Whether less or more of it is better, where its name does not tell."""
    trials: Annotated[int, Ge(1)] | None = None
    """Number of trials of the whole sweep; by default that of the grid."""
    workers: Annotated[int, Ge(1)] = 1
    """Trials that run at the same time."""
    nproc: Annotated[int, Ge(1)] = 1
    """Processes of a trial."""
    seeds: Annotated[int, Ge(1)] = 1
    """Runs of a trial, from training.seed on; their mean is its value."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the sampler."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Config key → value for all trials."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.space:
            raise ValueError("space is empty; name a config key and its values, such as optimizer.lr=1e-4..1e-1:log")
        for key, values in self.space.items():
            if isinstance(values, list) and len({text_of(one) for one in values}) < max(1, len(values)):
                raise ValueError(f"space.{key}: list different values, found {text_of(values)}")
            if key in self.overrides:
                raise ValueError(f"'{key}' is in space and in overrides; keep one")
        if self.seeds > 1 and "training.seed" in self.space:
            raise ValueError("space.training.seed: with seeds every trial has several of them; remove one of both")
        return self

    @property
    def is_grid(self) -> bool:
        """Whether every combination is tried."""
        if self.sampler is not None:
            return bool(self.sampler.component.name == "grid")
        return self.trials is None and all(isinstance(values, list) for values in self.space.values())

    @property
    def num_trials(self) -> int:
        """Number of trials of the whole sweep."""
        assert self.trials is not None or self.is_grid
        size = math.prod(len(one) for one in self.space.values() if isinstance(one, list))
        return min(self.trials or size, size) if self.is_grid else self.trials or 0

    def first_point(self) -> dict[str, Any]:
        """Return one combination of values."""
        return {key: next(candidates(values)) for key, values in self.space.items()}

    def identity(self) -> dict[str, Any]:
        """Return what must stay the same when a sweep is continued, as plain data."""
        kept = {name: getattr(self, name) for name in type(self).model_fields if name not in ("trials", "workers")}
        found = {name: _section(value) for name, value in kept.items()}
        # named, so that a grid stays one when it is continued with a number of trials
        return {**found, "sampler": found["sampler"] or {"name": "grid" if self.is_grid else "tpe"}}

    def to_yaml(self) -> str:
        """Return the sweep file that continues this sweep."""
        whole = {**self.identity(), "trials": self.trials, "workers": self.workers}
        return dump_yaml({name: value for name, value in whole.items() if value is not None})


def candidates(values: Range | list[Any]) -> Iterator[Any]:
    """Yield the values that are checked before the sweep: all of a list, the ends of a range and its first step."""
    if isinstance(values, list):
        yield from values
    else:
        yield from (values.low, values.high)
        yield from () if values.step is None else (min(values.low + values.step, values.high),)


def override(key: str, value: Any) -> str:
    """Return a setting as `etude train` takes it.

    >>> override("optimizer.lr", 1e-05), override("model.hidden", [64, 64]), override("model.name", "a: b")
    ('optimizer.lr=1.0e-05', 'model.hidden=[64, 64]', "model.name='a: b'")
    """
    return f"{key}={text_of(value)}"


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings in the order in which `etude train` takes all of them: a section replaces its keys before it.

    >>> overrides_of({"optimizer.lr": 0.1, "optimizer": "sgd"})
    ['optimizer=sgd', 'optimizer.lr=0.1']
    """
    return [override(key, settings[key]) for key in sorted(settings, key=lambda key: key.count("."))]


def read_spec(source: str, words: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> SweepSpec:
    """Return the sweep of a sweep file, an experiment or the folder of a sweep, with words of the command line.

    Raises ConfigError with one line for every mistake.
    """
    return validated(read_document(source, words, options))


def read_document(source: str, words: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> Document:
    """Read the same, not yet validated, with the place of every value."""
    folder = Path(source)
    path = folder / SPEC if is_file(folder / SPEC) else find_config(source)
    document = read_config(path)
    if "experiment" in document.data or "space" in document.data:
        experiment = document.data.get("experiment")
        if isinstance(experiment, str) and is_file(path.parent / experiment):
            document.data["experiment"] = str((path.parent / experiment).resolve())
    else:
        document = Document({"experiment": str(path.resolve())})
    for word in words:
        _add_word(document, word)
    for name, value in (options or {}).items():
        if value is not None:
            _put(document, name, value)
    return document


def validated(document: Document) -> SweepSpec:
    """Validate a sweep; raise ConfigError with one line for every mistake."""
    if "space" not in document.data:
        raise ConfigError(
            "there is nothing to sweep: name a config key with values, such as optimizer.lr=1e-4..1e-1:log or "
            "training.batch_size=32,64"
        )
    spec = validate_section(SweepSpec, document.data, document=document)
    if spec.is_grid and (ranges := [key for key, one in spec.space.items() if isinstance(one, Range)]):
        raise ConfigError(f"{document.place(f'space.{ranges[0]}')}: a grid needs a list of values")
    if spec.trials is None and not spec.is_grid:
        raise ConfigError("the number of trials is missing; pass --trials N, or trials: N in the sweep file")
    return spec


def _add_word(document: Document, word: str) -> None:
    """Add `key=1,2,3` or `key=1e-4..1e-1:log` to the space, and `key=value` to the overrides."""
    key, _, text = word.partition("=")
    key, value = key.strip(), _range(text, word) if _RANGE.fullmatch(text) else _choices(text)
    if value is None:
        key, value = parse_override(word)
        document.data.get("space", {}).pop(key, None)
        _put(document, "overrides", value, key)
        return
    parse_override(f"{key}=0")  # raises if the key is none
    document.data.get("overrides", {}).pop(key, None)
    _put(document, "space", value, key)


def _put(document: Document, section: str, value: Any, key: str = "") -> None:
    path = f"{section}.{key}" if key else section
    document.forget(path)
    document.locations[path] = Location(COMMAND_LINE)
    if key:
        inside = document.data.setdefault(section, {})
        if isinstance(inside, dict):
            inside[key] = value
    else:
        document.data[section] = value


def _range(text: str, word: str) -> dict[str, Any]:
    """Read `low..high`, `low..high:log` or `low..high:step`."""
    match = _RANGE.fullmatch(text)
    assert match is not None
    if "..." in text:  # 1...5 may mean 1 to 5 or 1 to 0.5
        raise ConfigError(f"{COMMAND_LINE}: '{word}': write two dots between the ends, as in 0..0.5")
    low, high, last = (None if one is None else parse_value(one) for one in match.groups())
    if last not in (None, "log") and not isinstance(last, (int, float)):
        raise ConfigError(f"{COMMAND_LINE}: '{word}': after the colon write log, or the step between values")
    extra = {} if last is None else {"log": True} if last == "log" else {"step": last}
    return {"low": low, "high": high, **extra}


def _choices(text: str) -> list[Any] | None:
    """Return several values separated by commas; None if it is one value."""
    try:
        values = parse_value(f"[{text}]")
    except ConfigError:
        return None
    return values if isinstance(values, list) and len(values) > 1 else None


def text_of(value: Any) -> str:
    """Return a value as YAML on one line."""
    return dump_yaml(value, flow=True).strip()


def _section(value: Any) -> Any:
    """Return a value of a sweep file as plain data, without the defaults of components."""
    if isinstance(value, Selection):
        return {"name": value.component.name, **plain(value.arguments)}
    if isinstance(value, Range):
        return value.model_dump(exclude_defaults=True)
    return {key: _section(one) for key, one in value.items()} if isinstance(value, dict) else value
