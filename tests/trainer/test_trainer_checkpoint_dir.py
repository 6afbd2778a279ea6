"""`training.checkpoint_dir`: checkpoints lie where it says, every door finds them, and no two runs share a folder."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from etude import Trainer
from etude.checkpoint import find_checkpoints
from etude.core import ConfigError, RunFolderError
from etude.experiment import evaluate_run, resume_run, train_experiment

COMPONENTS = Path(__file__).parents[1] / "cli" / "cli_components.py"


def trainer(folder: Path | None, checkpoint_dir: str | None, **options: object) -> Trainer:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    data = (x, (x[:, 0] > 0).long())
    torch.manual_seed(0)
    config = {"epochs": 1, "batch_size": 4, "device": "cpu", "checkpoint_dir": checkpoint_dir}
    return Trainer(nn.Linear(4, 2), data, data, config=config, output_dir=folder, progress=False, **options)


def write_config(folder: Path, checkpoint_dir: str | None) -> Path:
    setting = "" if checkpoint_dir is None else f", checkpoint_dir: {checkpoint_dir}"
    path = folder / "toy.yaml"
    path.write_text(
        f"imports: [{COMPONENTS}]\nmodel: {{name: cli_net}}\ndata: {{name: cli_points}}\n"
        f"training: {{epochs: 2, batch_size: 8, device: cpu, keep_best: 1{setting}}}\n"
    )
    return path


@pytest.mark.parametrize("place", ["data/checkpoints", "../beside", "{tmp}/scratch/weights"])
def test_train_resume_evaluate_and_retention(tmp_path: Path, place: str) -> None:
    place = place.format(tmp=tmp_path)
    run, where = tmp_path / "run", (tmp_path / "run" / place).resolve()
    train_experiment(write_config(tmp_path, place), run_dir=run, progress=False)
    assert not (run / "checkpoints").exists()
    resume_run(run, ["training.epochs=4"], progress=False)
    steps = sorted(find_checkpoints(where))
    assert len(steps) <= 2  # the last and the best
    assert (where / "last").resolve().name == f"step-{steps[-1]:08d}"
    path, numbers, *_ = evaluate_run(run, split="validation", which="last")
    assert path.resolve().parent == where
    straight = train_experiment(
        write_config(tmp_path, None), ["training.epochs=4"], run_dir=tmp_path / "straight", progress=False
    )
    assert numbers["loss"] == straight.metrics["val_loss"]
    weights = [folder / "last" / "model.safetensors" for folder in (where, tmp_path / "straight" / "checkpoints")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_two_runs_do_not_mix_their_checkpoints(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    config = write_config(tmp_path, shared)
    train_experiment(config, run_dir=tmp_path / "one", progress=False)
    before = sorted(path.name for path in Path(shared).iterdir())
    with pytest.raises(RunFolderError, match=r"shared already holds .*one"):
        train_experiment(config, run_dir=tmp_path / "two", progress=False)
    with pytest.raises(RunFolderError, match="shared"):
        train_experiment(config, run_dir=tmp_path / "two", overwrite=True, progress=False)
    with pytest.raises(RunFolderError, match="shared"):
        trainer(tmp_path / "three", shared).train()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(RunFolderError, match="shared"):
        resume_run(tmp_path / "copy", ["training.epochs=3"], progress=False)
    assert sorted(path.name for path in Path(shared).iterdir()) == before
    (tmp_path / "one").rename(tmp_path / "moved")
    resume_run(tmp_path / "moved", ["training.epochs=3"], progress=False)
    train_experiment(config, run_dir=tmp_path / "moved", overwrite=True, progress=False)


def test_another_folder_in_a_resume_is_where_the_checkpoints_are_now(tmp_path: Path) -> None:
    train_experiment(write_config(tmp_path, "a"), run_dir=tmp_path / "run", progress=False)
    with pytest.raises(RunFolderError, match=r"holds no checkpoint.*run/a"):
        resume_run(tmp_path / "run", ["training.epochs=3", "training.checkpoint_dir=b"], progress=False)
    (tmp_path / "run" / "a").rename(tmp_path / "run" / "b")
    resume_run(tmp_path / "run", ["training.epochs=3", "training.checkpoint_dir=b"], progress=False)
    assert evaluate_run(tmp_path / "run", split="validation")[0].parent.name == "b"


@pytest.mark.parametrize("place", ["weights", "{tmp}/elsewhere"])
def test_from_python(tmp_path: Path, place: str) -> None:
    place, folder = place.format(tmp=tmp_path), tmp_path / "run"
    trainer(folder, place).train()
    assert find_checkpoints((folder / place).resolve())
    with pytest.raises(RunFolderError, match="already holds"):
        trainer(folder, place).train()
    second = trainer(folder, place, resume=True)
    assert second.state.clock.epoch == 1
    second.train(num_epochs=2)
    third = trainer(None, None)
    third.load_checkpoint(folder / place / "last")
    assert third.state.clock.epoch == 2
    trainer(folder, place, overwrite=True).train()
    with pytest.raises(ConfigError, match="output_dir"):
        trainer(None, place)


@pytest.mark.parametrize("place", [".", "", "..", "config.yaml", "metrics.jsonl/x", "a/../.."])
def test_not_among_the_files_of_the_run(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.checkpoint_dir"):
        trainer(tmp_path / "run", place)
