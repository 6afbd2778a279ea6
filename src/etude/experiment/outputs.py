"""The files that a run and the callbacks of a config write, checked before a run has a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.config import Document, Problem, Selection, config_error
from etude.core import ConfigError
from etude.core.run_layout import output_problems
from etude.engine.callback import Callback
from etude.monitor import RunFolder

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
