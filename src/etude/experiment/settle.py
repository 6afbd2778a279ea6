"""What a config says of its data and of the files it writes, checked before either is touched."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.config import Document, Feature, Problem, Selection, config_error
from etude.core import ConfigError, DataError
from etude.core.run_layout import output_problems
from etude.core.spelling import listed
from etude.data.parts import check_stream_name, check_weights
from etude.engine.callback import Callback
from etude.monitor import RunFolder


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


_RUN_FOLDER = Path("a-run-folder")
"""Stands for the folder to be: relative names are the same in all of them."""


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
