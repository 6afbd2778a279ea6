"""Experiments: the sections of a config file, building a Trainer from them, and whole runs in a run folder."""

from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

from etude.lazy import import_room, load_late

if TYPE_CHECKING:
    from etude.experiment.build import build_data, build_trainer
    from etude.experiment.check import check_experiment
    from etude.experiment.config import (
        ExperimentConfig,
        all_sections,
        create_model_config,
        create_trainer_config,
        experiment_schema,
        load_config,
        load_experiment_config,
        validate_experiment,
    )
    from etude.experiment.load import load_model
    from etude.experiment.opened import evaluate_run
    from etude.experiment.planned import schedule_curves
    from etude.experiment.predict import predict_run
    from etude.experiment.profile import profile_experiment
    from etude.experiment.rate_finder import find_lr
    from etude.experiment.run import RunOutcome, resume_run, train_experiment
    from etude.experiment.runner import ExperimentRunner
    from etude.experiment.template import new_experiment, new_experiment_from

__all__ = [
    "ExperimentConfig",
    "ExperimentRunner",
    "RunOutcome",
    "all_sections",
    "build_data",
    "build_trainer",
    "check_experiment",
    "create_model_config",
    "create_trainer_config",
    "evaluate_run",
    "experiment_schema",
    "find_lr",
    "load_config",
    "load_experiment_config",
    "load_model",
    "new_experiment",
    "new_experiment_from",
    "predict_run",
    "profile_experiment",
    "resume_run",
    "schedule_curves",
    "train_experiment",
    "validate_experiment",
]

TOOL_ROOM = {"compare_tasks": "etude.multitask.compare", "compare_weightings": "etude.multitask.compare"}
"""Tool → module of an optional package. The tool is also a name of this package, with its runner bound."""

_load = load_late(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Return a name of this package, or a tool with its runner bound; tools of missing packages are unknown."""
    room = import_room(TOOL_ROOM[name]) if name in TOOL_ROOM else None
    if room is None:
        return _load(name)
    tool = getattr(room, name)
    given = update_wrapper(partial(tool, _load("ExperimentRunner")()), tool)
    del given.__wrapped__  # its signature would show the runner
    return given
