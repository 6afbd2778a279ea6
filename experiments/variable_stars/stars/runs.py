"""Runs of the experiment: trained once, and the models in them."""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from etude.checkpoint import CheckpointManager, load_model_state
from etude.core.errors import RunFolderError
from etude.distributed import World
from etude.experiment import (
    build_data,
    build_trainer,
    load_config,
    load_experiment_config,
    resume_run,
    train_experiment as train,
)
from etude.monitor import RunFolder
from stars.evaluate import Held, measure, open_split, runner

CONFIGS = Path(__file__).parents[1] / "configs"
WAYS = ("both", "ce", "meaningful")
NUMBERS = "numbers.json"


@dataclass(frozen=True)
class Trained:
    """The model of a finished run, and the folder of the data it was trained on."""

    model: nn.Module
    data: Path


def finished_run(way: str, seed: int, out: Path, overrides: list[str], *, progress: bool = False) -> Path:
    """Return the folder of a run: train it, go on with it, or find it finished there."""
    folder = RunFolder(out / f"{way}-{seed}")
    if not folder.holds_run:
        config = load_experiment_config(CONFIGS / f"{way}.yaml", overrides=[*overrides, f"training.seed={seed}"])
        outcome = train(config, run_dir=folder.path, progress=progress)
    elif folder.is_finished:
        return folder.path
    else:
        outcome = resume_run(folder.path, progress=progress)
    if outcome.status != "finished":
        raise RunFolderError(f"{folder.path} was interrupted; run the same command again to continue")
    return folder.path


def trained_model(run: Path) -> Trained:
    """Return the model of a run as it was at the end."""
    folder = RunFolder.open(run)
    config = load_config(folder.config_path)
    data = config.selection("data")
    if data is None or data.component.name != "variable_stars":
        raise RunFolderError(f"{run} is no run of variable_stars")
    trainer = build_trainer(config, data=build_data(config, World()), world=World(), progress=False)
    load_model_state(trainer.model, CheckpointManager(folder.checkpoints_path).load("last").model_state)
    return Trained(trainer.model, Path((data.defaults | data.arguments)["out"]).expanduser())


def numbers_of(run: Path) -> dict[str, float]:
    """Return the numbers of a finished run on the test split; computed once, and kept in its folder."""
    path = run / NUMBERS
    if path.exists():
        saved: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return saved
    found = trained_model(run)
    held, train_split = _splits(found.data)
    device = next(found.model.parameters()).device
    numbers = measure(runner(found.model, held.vocab, device), held, train_split)
    path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return numbers


def _splits(folder: Path) -> tuple[Held, Held]:
    return open_split(folder, "test"), open_split(folder, "train")
