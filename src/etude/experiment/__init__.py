"""Experiments: the sections of a config file, building them into a Trainer, and whole runs in a run folder."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.experiment.build import build_data, build_trainer
    from etude.experiment.check import check_experiment
    from etude.experiment.compare import compare_tasks
    from etude.experiment.compare_weightings import compare_weightings
    from etude.experiment.comparison import Comparison, WeightingComparison
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
    from etude.experiment.run import RunOutcome, evaluate_run, resume_run, train_experiment
    from etude.experiment.template import new_experiment

__all__ = [
    "Comparison",
    "ExperimentConfig",
    "RunOutcome",
    "WeightingComparison",
    "all_sections",
    "build_data",
    "build_trainer",
    "check_experiment",
    "compare_tasks",
    "compare_weightings",
    "create_model_config",
    "create_trainer_config",
    "evaluate_run",
    "experiment_schema",
    "load_config",
    "load_experiment_config",
    "new_experiment",
    "resume_run",
    "train_experiment",
    "validate_experiment",
]

__getattr__ = load_late(__name__, __file__)
