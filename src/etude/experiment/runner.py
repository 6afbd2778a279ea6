"""Running whole experiments, for tools such as comparisons that train and evaluate many of them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.checkpoint import CheckpointManager, load_model_state
from etude.config import Document
from etude.core import RunFolderError
from etude.core.files import write_text
from etude.distributed import World
from etude.experiment.build import Data, build_data, build_trainer
from etude.experiment.config import ExperimentConfig, load_config, load_experiment_config, validate_experiment
from etude.experiment.run import resume_run, train_experiment
from etude.monitor import RunFolder


class ExperimentRunner:
    """Loads, trains and evaluates experiments in one process; passed to the tools of features."""

    def load(self, experiment: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
        """Return the config of an experiment; raise ConfigError with one line for every mistake."""
        return load_experiment_config(experiment, overrides=overrides)

    def data(self, config: ExperimentConfig) -> Data:
        """Return the data of an experiment."""
        return build_data(config, World())

    def train(self, config: ExperimentConfig, path: Path, *, progress: bool) -> RunFolder:
        """Return the folder of the finished run: train it, continue it, or use the existing one.

        Raises RunFolderError if the folder holds a run of another config, KeyboardInterrupt if the run is interrupted.
        """
        folder = RunFolder(path)
        folder.place_checkpoints(config.training.checkpoint_dir)
        if not folder.holds_run:
            outcome = train_experiment(config, run_dir=path, progress=progress)
        else:
            as_written = validate_experiment(Document(config.to_dict()))
            if load_config(folder.config_path, announce=True).to_dict() != as_written.to_dict():
                raise RunFolderError(
                    f"{path} holds a run of another configuration; choose another --out, or remove it"
                )
            if folder.is_finished:
                return folder
            outcome = resume_run(path, progress=progress)
        if outcome.status != "finished":
            stop = KeyboardInterrupt()
            stop.add_note("trained runs are kept; run the same command again to continue")
            raise stop
        return folder

    def evaluate(self, config: ExperimentConfig, folder: RunFolder, data: Data) -> dict[str, Any]:
        """Return `step`, `parameters` and `splits` of the last checkpoint of a finished run.

        `splits` has the metrics on validation and test that are not NaN. They are stored in `evaluation.json` of the
        folder, and recomputed only if the run was continued.
        """
        step, path = folder.read_result()["step"], folder.path / "evaluation.json"
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if saved.get("step") == step:
            return saved
        trainer = build_trainer(config, data=data, world=World(), progress=False)
        load_model_state(trainer.model, CheckpointManager(folder.checkpoints_path).load("last").model_state)
        found = {}
        for split in ("validation", "test"):
            if (loader := data.loader(split)) is not None:
                numbers = trainer.evaluate(loader)
                found[split] = {key: value for key, value in numbers.items() if not math.isnan(value)}
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        saved = {"step": step, "parameters": parameters, "splits": found}
        write_text(path, json.dumps(saved, indent=2) + "\n")
        return saved
