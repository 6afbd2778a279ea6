"""What is settled around the validation of a file: old keys move before it, data and outputs are checked after it.

Keys that some files keep under `training` move to the sections they belong to, one way.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.config import Document, Feature, Problem, Selection, config_error
from etude.config.document import put_setting
from etude.config.shapes import canonical_keys
from etude.core import ConfigError, DataError
from etude.core.run_layout import output_problems
from etude.core.spelling import listed
from etude.data.splits import check_stream_name, check_weights
from etude.engine.callback import Callback
from etude.experiment.features import features_for
from etude.monitor import RunFolder
from etude.trainer import TRAINING_ALIASES
from etude.trainer.optimization import DEFAULT_SCHEDULE

_MOVES = {
    "learning_rate": ("optimizer", "lr", ("lr", "learning_rate")),
    "weight_decay": ("optimizer", "weight_decay", ("weight_decay",)),
    "warmup_steps": ("scheduler", "warmup_steps", ("warmup_steps",)),
    "scheduler_type": ("scheduler", "name", ("name",)),
}
"""Key under `training` → section, key there, and the spellings under which that section may already have it."""
_MOVED_BY = {"meaningful_loss": "etude.multimodal"}
"""Key under `training` → the room whose feature moves it."""
LEGACY_KEYS = (*_MOVES, "use_scheduler", "use_mixed_precision", "precision_dtype", *_MOVED_BY)
"""Keys of `training` that the other sections, and `precision`, say better: shown only where they say something."""
DEFAULT_NAMES = {"optimizer": "adamw", "scheduler": DEFAULT_SCHEDULE}
"""The component of an optimizer section without a name, or of one that only a key of `training` speaks of."""
_RUN_FOLDER = Path("a-run-folder")
"""Stands for the folder to be: relative names are the same in all of them."""


def move_legacy_keys(document: Document) -> None:
    """Give every setting its one place, in the document itself; messages keep showing what was written.

    Raises ConfigError if one file gives the same setting in both places. Between files, and from the command line,
    the later one wins.
    """
    data = document.data
    optimizer = data.get("optimizer")
    if isinstance(optimizer, dict) and "name" not in optimizer:
        data["optimizer"] = {"name": DEFAULT_NAMES["optimizer"], **optimizer}
    training = data.get("training")
    if not isinstance(training, dict):
        return
    training = data["training"] = canonical_keys(training, TRAINING_ALIASES, "training", document)
    if isinstance(training.get("use_scheduler"), bool | None):  # else validation says what it must be
        _switch_scheduler(document, training, training.pop("use_scheduler", None))
    for key, (section, name, spellings) in _MOVES.items():
        if training.get(key) is not None:
            _move(document, training, key, section, name, spellings)
    for key, room in _MOVED_BY.items():
        if training.get(key) is not None:
            features = features_for((), [room])
            if not features:
                raise ConfigError(f"{document.place(f'training.{key}')}: needs {room}, which is not installed")
            features[0].move_legacy_keys(document, training)


def _switch_scheduler(document: Document, training: dict[str, Any], use_scheduler: bool | None) -> None:
    data, here = document.data, "training.use_scheduler"
    if use_scheduler is False:
        if data.get("scheduler") is not None:
            keys = [key for key in document.locations if key.partition(".")[0] == "scheduler"]
            later = max(map(document.layer, keys), default=0) - document.layer(here)
            if later == 0:
                raise ConfigError(f"{document.place(here)}: False contradicts the `scheduler:` section; keep one")
            if later > 0:
                return
        data["scheduler"] = None
        training.pop("scheduler_type", None)
        training.pop("warmup_steps", None)
    elif use_scheduler and data.get("scheduler") is None and training.get("scheduler_type") is None:
        data["scheduler"] = {"name": DEFAULT_NAMES["scheduler"]}


def _move(
    document: Document, training: dict[str, Any], key: str, section: str, name: str, spellings: tuple[str, ...]
) -> None:
    here = f"training.{key}"
    target = document.data.get(section)
    if isinstance(target, str):
        target = document.data[section] = {"name": target}
    if target is not None and not isinstance(target, dict):
        return  # not a section at all: validation says so
    value = training.pop(key)
    if target is None:
        target = document.data[section] = {"name": DEFAULT_NAMES[section]}
    if name == "name" and f"{section}.name" not in document.locations:
        spellings = ()  # filled in above, and said by no one
    put_setting(document, target, value, here=here, section=section, spellings=spellings, name=name)


def settle_data(sections: Mapping[str, Any], document: Document, features: Collection[Feature] = ()) -> None:
    """Raise ConfigError for streams and weights that cannot be, and for settings that streams do not have."""
    found: list[tuple[str, Selection]] = [("data", data)] if (data := sections.get("data")) is not None else []
    found += [one for feature in features for one in feature.data_sets(sections).values()]
    problems = [problem for path, selection in found for problem in _selection(path, selection)]
    has_streams = any(path != "data" or one.component.name == "streams" for path, one in found)
    if has_streams and (workers := sections["training"].num_workers):
        text = (
            f"is {workers}, but streams are read in the process that trains; set it to 0, and prefetch to read ahead"
        )
        problems.append(Problem("training.num_workers", text))
    if problems:
        raise config_error(problems, document)


def _selection(path: str, data: Selection) -> Iterator[Problem]:
    weights = data.arguments.get("weights")
    if data.component.name == "streams" and isinstance(streams := data.arguments.get("streams"), Mapping):
        yield from _streams(path, streams)
        if isinstance(weights, Mapping) and streams:
            try:
                check_weights(weights, streams)
            except DataError as error:
                yield Problem(f"{path}.weights", str(error))
    elif data.component.name == "token_mixture" and isinstance(roots := data.arguments.get("roots"), Mapping):
        if not roots:
            yield Problem(f"{path}.roots", "a mixture needs at least one source")
        elif isinstance(weights, Mapping) and set(weights) != set(roots):
            text = (
                f"there are weights for {listed(weights)}, but the sources are {listed(roots)}; give each one weight"
            )
            yield Problem(f"{path}.weights", text)


def _streams(path: str, streams: Mapping[str, Any]) -> Iterator[Problem]:
    if not streams:
        yield Problem(f"{path}.streams", "there are no streams; name at least one data set")
    for name, one in streams.items():
        try:
            check_stream_name(name)
        except DataError as error:
            yield Problem(f"{path}.streams.{name}", str(error))
        if isinstance(one, Selection) and one.component.name == "streams":
            yield Problem(f"{path}.streams.{name}", "is made of streams itself; list them side by side")


def settle_outputs(sections: Mapping[str, Any], document: Document) -> None:
    """Raise ConfigError if checkpoints or a callback would write over a file of the run, or of another callback."""
    selections: list[Selection] = sections.get("callbacks") or []
    outputs = []
    problems: list[Problem] = []
    try:
        RunFolder(_RUN_FOLDER).place_checkpoints(sections["training"].checkpoint_dir)
    except ConfigError as error:
        key = "training.checkpoint_dir"
        problems.append(Problem(key, str(error).removeprefix(f"{key} ")))
    for count, one in enumerate(selections):
        factory = one.component.factory
        if isinstance(factory, type) and issubclass(factory, Callback):
            try:
                outputs += [(f"callbacks.{count}", name) for name in factory.writes(one.defaults | one.arguments)]
            except ConfigError as error:
                problems.append(Problem(f"callbacks.{count}", str(error)))
    for place, problem in output_problems(outputs, _RUN_FOLDER):
        problems.append(Problem(place, f"{problem}; give it another file name"))
    if problems:
        raise config_error(problems, document)
