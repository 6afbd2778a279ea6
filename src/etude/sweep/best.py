"""The config of the best trial, as a file that `etude train` takes."""

from typing import TYPE_CHECKING

from etude.config import dump_yaml, read_config
from etude.core.errors import ConfigError, RunFolderError
from etude.monitor.reading import CONFIG
from etude.sweep.folder import SweepFolder
from etude.sweep.spec import SweepSpec
from etude.sweep.table import best_trial

if TYPE_CHECKING:
    from optuna import Study


def best_config(folder: SweepFolder, spec: SweepSpec, study: "Study") -> str:
    """Return the config of the best trial as YAML; raise an error if there is none."""
    if (trial := best_trial(study)) is None:
        raise ConfigError(f"no trial of {folder.path} is complete yet")
    path = folder.runs(trial.number, spec.seeds)[0] / CONFIG
    if not path.is_file():
        raise RunFolderError(f"trial {trial.number} is the best, but {path} is missing; it may be on another machine")
    config, experiment = read_config(path).data, read_config(folder.experiment_path).data
    if "training.num_threads" not in spec.space:  # the cores were shared between trials
        config["training"]["num_threads"] = experiment["training"]["num_threads"]
    seeds = f", the mean of {spec.seeds} seeds" if spec.seeds > 1 else ""
    return f"# trial {trial.number} of {folder.path}: {spec.metric} {trial.value:.6g}{seeds}\n{dump_yaml(config)}"
