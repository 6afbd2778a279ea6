"""Steps around the validation of a file: old keys are moved before it, data and outputs are checked after it.

Keys that older files have under `training` are moved to their sections.
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
from etude.trainer.schedule import DEFAULT_SCHEDULE

_MOVES = {
    "learning_rate": ("optimizer", "lr", ("lr", "learning_rate")),
    "weight_decay": ("optimizer", "weight_decay", ("weight_decay",)),
    "warmup_steps": ("scheduler", "warmup_steps", ("warmup_steps",)),
    "scheduler_type": ("scheduler", "name", ("name",)),
}
"""Key under `training` → section, key there, and its aliases in that section."""
_MOVED_BY = {"meaningful_loss": "etude.multimodal"}
"""Key under `training` → the package whose feature moves it."""
LEGACY_KEYS = (*_MOVES, "use_scheduler", "use_mixed_precision", "precision_dtype", *_MOVED_BY)
"""Keys of `training` that other sections or `precision` replace: shown only if set."""
DEFAULT_NAMES = {"optimizer": "adamw", "scheduler": DEFAULT_SCHEDULE}
"""The default optimizer, for a section without a name or settings under `training`."""
_RUN_FOLDER = Path("a-run-folder")
"""Placeholder for the future run folder: relative names are resolved against it."""


def move_legacy_keys(document: Document) -> None:
    """Move every setting to its section, in the document itself; messages still show what was written.

    Raises ConfigError if one file has the same setting in both places. Between files, and from the command line, the
    later one takes precedence.
    """
    data = document.data
    optimizer = data.get("optimizer")
    if isinstance(optimizer, dict) and "name" not in optimizer:
        data["optimizer"] = {"name": DEFAULT_NAMES["optimizer"], **optimizer}
    training = data.get("training")
    if not isinstance(training, dict):
        return
    training = data["training"] = canonical_keys(training, TRAINING_ALIASES, "training", document)
    if isinstance(training.get("use_scheduler"), bool | None):  # otherwise validation reports the type
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
        return  # not a section: validation reports it
    value = training.pop(key)
    if target is None:
        target = document.data[section] = {"name": DEFAULT_NAMES[section]}
    if name == "name" and f"{section}.name" not in document.locations:
        spellings = ()  # filled in above, not given by the user
    put_setting(document, target, value, here=here, section=section, spellings=spellings, name=name)


def settle_data(sections: Mapping[str, Any], document: Document, features: Collection[Feature] = ()) -> None:
    """Raise ConfigError for invalid streams and weights, and for settings that streams do not support."""
    found: list[tuple[str, Selection]] = [("data", data)] if (data := sections.get("data")) is not None else []
    found += [one for feature in features for one in feature.data_sets(sections).values()]
    problems = [problem for path, selection in found for problem in _selection(path, selection)]
    has_streams = any(path != "data" or one.component.name == "streams" for path, one in found)
    if has_streams and (workers := sections["training"].num_workers):
        text = f"is {workers}, but streams are read in the training process; set it to 0, and use prefetch"
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
            yield Problem(f"{path}.roots", "a mixture needs at least one source; add one")
        elif isinstance(weights, Mapping) and set(weights) != set(roots):
            text = (
                f"there are weights for {listed(weights)}, but the sources are {listed(roots)}; set one weight for "
                "each source"
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
            yield Problem(f"{path}.streams.{name}", "consists of streams itself; list its streams directly")


def settle_outputs(sections: Mapping[str, Any], document: Document) -> None:
    """Raise ConfigError if checkpoints or a callback would overwrite a file of the run or of another callback."""
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
        problems.append(Problem(place, f"{problem}; choose another file name"))
    if problems:
        raise config_error(problems, document)
